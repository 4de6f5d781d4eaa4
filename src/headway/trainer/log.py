"""Where a Trainer's values go: the history, the callbacks, the run's log with its trackers; and what memory is used."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.accelerator import Accelerator
from headway.memory.monitor import MemoryMonitor
from headway.memory.use import memory_use
from headway.trainer.callbacks import Events
from headway.trainer.results import Metrics
from headway.trainer.settings.arguments import TrainingArguments


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
        folder = Path(args.output_dir or ".").absolute()
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
