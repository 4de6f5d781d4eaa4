"""Logs of training runs and evaluations, and other files that a Trainer writes."""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from headway.accelerator import Accelerator
from headway.common.object_path import open_writable, to_path
from headway.core.memory.monitor import MemoryMonitor
from headway.core.memory.use import memory_use
from headway.core.training.full_weights import FullWeights
from headway.core.weights.export import has_adapters, write_configurations
from headway.trainer.arguments import TrainingArguments
from headway.trainer.callbacks import Events, TrainerState
from headway.trainer.results import Metrics

_NAME_ARGUMENTS = {
    "wandb": "name",
    "trackio": "name",
    "mlflow": "run_name",
    "swanlab": "experiment_name",
    "clearml": "task_name",
}
"""Name of the argument with which a tracker's package names a run, by the tracker's name."""


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
            combined: Whether to add the metrics to `all_results.json` too.
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
        lines = [f"# {name}", "", f"{type(self.model).__name__}, {state.global_step} updates.", ""]
        lines += [f"- {key}: {value}" for key, value in about.items() if value is not None]
        lines += [f"- {key}: {value}" for key, value in (evaluations[-1] if evaluations else {}).items()]
        (folder / "README.md").write_text("\n".join(lines) + "\n")


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


@dataclass(frozen=True)
class Log:
    """Log of values outside of a training run, such as the metrics of a separate evaluation.

    After a training run, the values are added to the log of that run.

    Attributes:
        args: Arguments of the Trainer, with names and folders.
        accelerator: Accelerator of the run.
        events: Dispatcher that passes the values to callbacks and keeps their history.
    """

    args: TrainingArguments
    accelerator: Accelerator
    events: Events

    def start_log(self) -> None:
        """Start the run's log and its trackers. If the run has already been logged, continue them."""
        args = self.args
        folder = args.folder.absolute()
        # Without `logging_dir`, the log is in the folder of the run, whose name it must have.
        name = folder.name if args.logging_dir is None else args.run_name or folder.name
        init_kwargs: dict[str, dict[str, Any]] = {}
        if args.run_name is not None:
            init_kwargs = {tracker: {argument: args.run_name} for tracker, argument in _NAME_ARGUMENTS.items()}
        self.accelerator.init_trackers(name, config=args.to_dict(), init_kwargs=init_kwargs)

    def write_values(self, values: Metrics) -> None:
        """Write values and the epoch to the history, the callbacks, the run's log and its trackers.

        The epoch is added to the given dict. The run's log and the trackers are used only if at least one update has
        been made.
        """
        self._add_to_history(values)
        if self.accelerator.num_updates:
            self.start_log()
            self.accelerator.log(values, step=self.events.state.global_step)
            self.accelerator.end_trackers()

    def _add_to_history(self, values: Metrics) -> None:
        state = self.events.state
        values.setdefault("epoch", round(state.epoch, 6))
        state.log_history.append({**values, "step": state.global_step})
        self.events.call_event("on_log", logs=values)

    def measure_phase(self, name: str) -> AbstractContextManager[Any]:
        """Return a context manager that does nothing.

        In the subclass `TrainingLog`, it measures the peak memory of a phase.

        Args:
            name: Name of the phase, such as "evaluation".
        """
        return nullcontext()


@dataclass(frozen=True)
class TrainingLog(Log):
    """Log of a training run in progress.

    Attributes:
        args: Arguments of the Trainer, with names and folders.
        accelerator: Accelerator of the run.
        events: Dispatcher that passes the values to callbacks and keeps their history.
        monitor: Monitor of memory use.
    """

    monitor: MemoryMonitor

    def write_values(self, values: Metrics) -> None:
        """Log values together with the memory use of this process's device in bytes.

        If the values include "loss", also log the throughput since the last entry with "loss". The epoch is added to
        the given dict.
        """
        self._add_to_history(values)
        memory = {"memory": memory_use(self.accelerator.device).used, **self.list_peaks("memory_peak", "memory/")}
        measured = {name: float(num_bytes) for name, num_bytes in memory.items()}
        if "loss" in values:
            measured |= self.accelerator.throughput.values()
        self.accelerator.log({**values, **measured}, step=self.events.state.global_step)

    def list_peaks(self, name: str, prefix: str) -> dict[str, int]:
        """Return the peak memory of training and of its phases in bytes, by name.

        The phases are left out if `skip_memory_metrics` is set.

        Args:
            name: Name of the overall peak.
            prefix: Prefix of the names of the phases' peaks.
        """
        phases = self.monitor.peaks.items() if not self.args.skip_memory_metrics else ()
        return {name: self.monitor.peak} | {f"{prefix}{phase}": peak for phase, peak in phases}

    def measure_phase(self, name: str) -> AbstractContextManager[Any]:
        """Return a context manager that measures the peak memory of its block as a separate phase.

        It does nothing if `skip_memory_metrics` is set.
        """
        return self.monitor.phase(name) if not self.args.skip_memory_metrics else nullcontext()
