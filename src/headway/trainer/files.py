"""`FileMethods`: the Trainer's methods that write the model, the metrics and the model card to files."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from headway.accelerator import Accelerator
from headway.common.object_path import open_writable, to_path
from headway.core.strategies.blocks import get_class_name
from headway.core.training.full_weights import FullWeights
from headway.core.weights.pretrained_files import has_adapters, write_configurations
from headway.trainer.arguments import TrainingArguments
from headway.trainer.callbacks import TrainerState
from headway.trainer.results import Metrics


class FileMethods:
    """Methods of the Trainer that write files other than checkpoints. A subclass may override each of them.

    Attributes:
        accelerator: Accelerator of the current training run, or of the last one.
        args: Training arguments.
        model: The user's model.
        processing_class: Tokenizer or similar object that is saved with the model, or None.
        state: Progress of the training.
    """

    accelerator: Accelerator
    args: TrainingArguments
    model: torch.nn.Module
    processing_class: Any
    state: TrainerState

    def _get_output_folder(self, output_dir: str | Path | None = None) -> Path:
        """Return a folder as a path; if None, the `output_dir` of the arguments.

        The main process creates the folder if it is missing.
        """
        folder = to_path(output_dir) if output_dir else self.args.folder
        if self.accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Write the files of the model, the processing class and the arguments. `save_model` calls it.

        Of a model with adapters, such as PEFT's, only the adapters are written, in their own format.

        If a subclass overrides this method, only rank 0 calls it.

        Args:
            output_dir: Folder to write to. None: the `output_dir` of the TrainingArguments.
            state_dict: State dict to save instead of the model's own, if the model has `save_pretrained`.
                None (the default): the model's own.
        """
        folder = to_path(output_dir) if output_dir else self.args.folder
        save: Any = getattr(self.model, "save_pretrained", None)
        if state_dict is None and has_adapters(self.model):
            FullWeights(self.accelerator.strategy, self.accelerator.runtime).save_adapters(self.model, folder)
        elif state_dict is None or not callable(save):
            self.accelerator.save_model(self.model, folder)
        else:
            with open_writable(folder) as local:
                save(local, state_dict=state_dict)
        if not self.accelerator.is_main_process:
            return
        with open_writable(folder) as local:
            write_configurations(self.model, local, (self.processing_class,))
        (folder / "training_args.json").write_text(self.args.to_json_string() + "\n")

    def save_state(self) -> None:
        """Write the progress of training and all logged values to `trainer_state.json`, on the main process.

        Weights, optimizer state and other state are not written. Checkpoints contain them.
        """
        if self.accelerator.is_main_process:
            _write_json(self._get_output_folder() / "trainer_state.json", asdict(self.state))

    def save_metrics(self, split: str, metrics: Metrics, combined: bool = True) -> None:
        """Write metrics to `<output_dir>/<split>_results.json` on the main process.

        Args:
            split: "train", "eval", "test" or "all".
            metrics: Values by name.
            combined: Whether to add the metrics to `all_results.json` too. Default: True.
        """
        if not self.accelerator.is_main_process:
            return
        folder = self._get_output_folder()
        _write_json(folder / f"{split}_results.json", metrics)
        if combined:
            path = folder / "all_results.json"
            earlier = json.loads(path.read_text()) if path.exists() else {}
            _write_json(path, {**earlier, **metrics})

    def create_model_card(self, **about: object) -> None:
        """Write `README.md` with a description of the training run and the results of the last evaluation.

        The main process writes it into `output_dir`.

        Args:
            about: Additional entries of the card by name: language, license, dataset, tasks, ... `model_name` is its
                title; by default, this is the name of the folder.
        """
        if not self.accelerator.is_main_process:
            return
        folder, state = self._get_output_folder(), self.state
        name = about.pop("model_name", None) or folder.absolute().name
        evaluations = [entry for entry in state.log_history if any(key.startswith("eval_") for key in entry)]
        lines = [f"# {name}", "", f"{get_class_name(self.model)}, {state.global_step} updates.", ""]
        lines += [f"- {key}: {value}" for key, value in about.items() if value is not None]
        lines += [f"- {key}: {value}" for key, value in (evaluations[-1] if evaluations else {}).items()]
        (folder / "README.md").write_text("\n".join(lines) + "\n")


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write values to a JSON file, sorted by name."""
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
