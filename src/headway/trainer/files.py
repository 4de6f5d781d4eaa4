"""The half of the Trainer that writes files: the model, its results, its state."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headway.trainer.evaluating import Evaluating


class Files(Evaluating):
    """What a Trainer writes beside its checkpoints; the folder is that of the arguments unless another is given."""

    def _folder(self) -> Path:
        folder = Path(self.args.output_dir or ".")
        if self.accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Write the weights as safetensors, the model's config and the processing class; every rank calls it.

        Args:
            output_dir: None: that of the arguments.
            _internal_call: accepted for the name's sake.
        """
        folder = Path(output_dir or self.args.output_dir or ".")
        if type(self)._save is not Files._save:
            if self.accelerator.is_main_process:
                folder.mkdir(parents=True, exist_ok=True)
                self._save(str(folder))
            self.accelerator.wait_for_everyone()
            return
        self.accelerator.save_model(self.model, folder)
        self._save_beside(folder)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """What `save_model` does on rank 0 where a subclass overrides this.

        Args:
            output_dir: None: that of the arguments.
            state_dict: in place of the model's own.
        """
        folder = Path(output_dir or self.args.output_dir or ".")
        model: Any = self.model
        if state_dict is None or not callable(getattr(model, "save_pretrained", None)):
            self.accelerator.save_model(self.model, folder)
        else:
            model.save_pretrained(folder, state_dict=state_dict)
        self._save_beside(folder)

    def _save_beside(self, folder: Path) -> None:
        if not self.accelerator.is_main_process:
            return
        for part in (
            getattr(self.model, "config", None),
            getattr(self.model, "generation_config", None),
            self.processing_class,
        ):
            if callable(getattr(part, "save_pretrained", None)):
                part.save_pretrained(folder)  # type: ignore[union-attr]
        (folder / "training_args.json").write_text(self.args.to_json_string() + "\n")

    def save_state(self) -> None:
        """Write `trainer_state.json`: how far the training is, and all that was logged. Checkpoints hold the rest."""
        folder = self._folder()
        if self.accelerator.is_main_process:
            (folder / "trainer_state.json").write_text(json.dumps(asdict(self.state), indent=2, sort_keys=True) + "\n")

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write metrics to `<output_dir>/<split>_results.json`, from the main process.

        Args:
            split: "train", "eval", "test" or "all".
            metrics: by name.
            combined: add them to `all_results.json`, too.
        """
        folder = self._folder()
        if not self.accelerator.is_main_process:
            return
        _write(folder / f"{split}_results.json", metrics)
        if combined:
            path = folder / "all_results.json"
            _write(path, {**(json.loads(path.read_text()) if path.exists() else {}), **metrics})

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print metrics, one a line, from the main process."""
        if self.accelerator.is_main_process:
            print(f"***** {split} metrics *****")
            for name, value in sorted(self.metrics_format(metrics).items()):
                print(f"  {name} = {value}")

    @staticmethod
    def metrics_format(metrics: dict[str, Any]) -> dict[str, Any]:
        """Metrics as `log_metrics` prints them."""
        return dict(metrics)

    def create_model_card(self, **about: Any) -> None:
        """Write `README.md`: what was trained, and the last evaluation.

        Args:
            about: what else the card says, by name: language, license, dataset, tasks, ...
        """
        folder = self._folder()
        if not self.accelerator.is_main_process:
            return
        name = about.pop("model_name", None) or folder.absolute().name
        evaluations = [entry for entry in self.state.log_history if any(key.startswith("eval_") for key in entry)]
        lines = [f"# {name}", "", f"{type(self.model).__name__}, {self.state.global_step} updates.", ""]
        lines += [f"- {key}: {value}" for key, value in about.items() if value is not None]
        lines += [f"- {key}: {value}" for key, value in (evaluations[-1] if evaluations else {}).items()]
        (folder / "README.md").write_text("\n".join(lines) + "\n")


def _write(path: Path, metrics: dict[str, Any]) -> None:
    path.write_text(json.dumps(metrics, indent=2, sort_keys=True) + "\n")
