"""What a Trainer returns and writes: results, its files, and where logged values go.

Where a Trainer's values go: the history, the callbacks, the run's log with its trackers; and what memory is used.
"""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headway.accelerator import Accelerator
from headway.common.object_path import to_path, writable
from headway.memory.monitor import MemoryMonitor
from headway.memory.use import memory_use
from headway.runtime.collectives.tree import Tree
from headway.trainer.arguments import TrainingArguments
from headway.trainer.callbacks import Events, TrainerState
from headway.weights.export import describe

Metrics = dict[str, Any]
"""Numbers by name; what a user's metric gives may be something else."""


class TrainOutput(NamedTuple):
    """What `Trainer.train` returns.

    Attributes:
        global_step: updates made, over all attempts of the run.
        training_loss: the mean over all updates.
        metrics: train_runtime (s), train_samples_per_second, train_steps_per_second (of this attempt), train_loss, epoch,
            train_memory_peak (bytes on this process's device).
    """

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class EvalPrediction(NamedTuple):
    """What `compute_metrics` is given: arrays, or tuples of arrays, with one row for each sample.

    Attributes:
        predictions: the model's outputs without the loss, or what `preprocess_logits_for_metrics` made of them.
        label_ids: the labels; None where there are none.
    """

    predictions: Tree
    label_ids: Tree


class EvalLoopOutput(NamedTuple):
    """What `Trainer.evaluation_loop` returns.

    Attributes:
        predictions, label_ids: as in `EvalPrediction`; None where only the loss was asked for.
        metrics: by name.
        num_samples: rows of all ranks.
    """

    predictions: Tree
    label_ids: Tree
    metrics: dict[str, float]
    num_samples: int | None


class PredictionOutput(NamedTuple):
    """What `Trainer.predict` returns.

    Attributes:
        predictions, label_ids: as in `EvalPrediction`.
        metrics: their names begin with "test_".
    """

    predictions: Tree
    label_ids: Tree
    metrics: dict[str, float]


def speed(prefix: str, seconds: float, num_samples: int, num_steps: int) -> dict[str, float]:
    """The runtime in seconds, and samples and steps per second."""
    span = max(seconds, 1e-9)
    return {
        f"{prefix}_runtime": round(seconds, 4),
        f"{prefix}_samples_per_second": round(num_samples / span, 3),
        f"{prefix}_steps_per_second": round(num_steps / span, 3),
    }


# ---------------------------------------------------------------- files


class FileMethods:
    """What a Trainer writes beside its checkpoints: its methods, each of which a subclass may override."""

    accelerator: Accelerator
    args: TrainingArguments
    model: torch.nn.Module
    processing_class: Any
    state: TrainerState

    def _output_folder(self, given: str | Path | None = None) -> Path:
        """The folder given, or that of the arguments; it is there on the main process."""
        folder = to_path(given) if given else self.args.folder
        if self.accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """What `save_model` does; only on rank 0 where a subclass overrides this.

        Args:
            output_dir: None: that of the arguments.
            state_dict: in place of the model's own, where the model can write itself.
        """
        folder = to_path(output_dir) if output_dir else self.args.folder
        save: Any = getattr(self.model, "save_pretrained", None)
        if state_dict is None or not callable(save):
            self.accelerator.save_model(self.model, folder)
        else:
            with writable(folder) as local:
                save(local, state_dict=state_dict)
        if not self.accelerator.is_main_process:
            return
        with writable(folder) as local:
            describe(self.model, local, (self.processing_class,))
        (folder / "training_args.json").write_text(self.args.to_json_string() + "\n")

    def save_state(self) -> None:
        """Write `trainer_state.json`: how far the training is, and all that was logged. Checkpoints hold the rest."""
        if self.accelerator.is_main_process:
            _write(self._output_folder() / "trainer_state.json", asdict(self.state))

    def save_metrics(self, split: str, metrics: Metrics, combined: bool = True) -> None:
        """Write metrics to `<output_dir>/<split>_results.json`, from the main process.

        Args:
            split: "train", "eval", "test" or "all".
            metrics: by name.
            combined: add them to `all_results.json`, too.
        """
        if not self.accelerator.is_main_process:
            return
        folder = self._output_folder()
        _write(folder / f"{split}_results.json", metrics)
        if combined:
            path = folder / "all_results.json"
            _write(path, {**(json.loads(path.read_text()) if path.exists() else {}), **metrics})

    def create_model_card(self, **about: object) -> None:
        """Write `README.md`: what was trained, and the last evaluation.

        Args:
            about: what else the card says, by name: language, license, dataset, tasks, ...
        """
        if not self.accelerator.is_main_process:
            return
        folder, state = self._output_folder(), self.state
        name = about.pop("model_name", None) or folder.absolute().name
        evaluations = [entry for entry in state.log_history if any(key.startswith("eval_") for key in entry)]
        lines = [f"# {name}", "", f"{type(self.model).__name__}, {state.global_step} updates.", ""]
        lines += [f"- {key}: {value}" for key, value in about.items() if value is not None]
        lines += [f"- {key}: {value}" for key, value in (evaluations[-1] if evaluations else {}).items()]
        (folder / "README.md").write_text("\n".join(lines) + "\n")


def _write(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


@dataclass(frozen=True)
class Log:
    """Logs what is found outside a training; once something was trained, it belongs to that run's log.

    Attributes:
        args: names and places.
        accelerator: whose run's log it is.
        events: told of the values; keeps their history.
    """

    args: TrainingArguments
    accelerator: Accelerator
    events: Events

    def begin(self) -> None:
        """Begin the run's log and its trackers, or go on with them."""
        args = self.args
        folder = args.folder.absolute()
        name = folder.name if args.logging_dir is None else args.run_name or folder.name
        self.accelerator.init_trackers(name, config=args.to_dict())

    def write(self, values: Metrics) -> None:
        """Log values; their `epoch` is added to them."""
        self._note(values)
        if self.accelerator.num_updates:
            self.begin()
            self.accelerator.log(values, step=self.events.state.global_step)
            self.accelerator.end_trackers()

    def _note(self, values: Metrics) -> None:
        state = self.events.state
        values.setdefault("epoch", round(state.epoch, 6))
        state.log_history.append({**values, "step": state.global_step})
        self.events.tell("on_log", logs=values)

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Count the memory of the block as a phase of its own, where phases are counted."""
        return nullcontext()


@dataclass(frozen=True)
class TrainingLog(Log):
    """The log of a training in progress.

    Attributes:
        args, accelerator, events: as for every log.
        monitor: measures the training's memory.
    """

    monitor: MemoryMonitor

    def write(self, values: Metrics) -> None:
        """Log values, and with them the memory; with a loss the pace since the last one too."""
        self._note(values)
        peaks = self.peaks("memory_peak", "memory/")
        used = {"memory": memory_use(self.accelerator.device).used, **peaks}
        found = {name: float(value) for name, value in used.items()}
        if "loss" in values:
            found |= self.accelerator.throughput.values()
        self.accelerator.log({**values, **found}, step=self.events.state.global_step)

    def peaks(self, name: str, prefix: str) -> dict[str, int]:
        """The peak under that name, and that of each phase with the prefix, in bytes."""
        phases = self.monitor.peaks.items() if not self.args.skip_memory_metrics else ()
        return {name: self.monitor.peak} | {f"{prefix}{phase}": peak for phase, peak in phases}

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Count the memory of the block as a phase of its own, where phases are counted."""
        return self.monitor.phase(name) if not self.args.skip_memory_metrics else nullcontext()
