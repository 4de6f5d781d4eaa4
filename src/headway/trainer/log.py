"""Where a Trainer's values go: the history, the callbacks, the run's log with its trackers; and what memory is used."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from headway.accelerator import Accelerator
from headway.memory.monitor import MemoryMonitor
from headway.memory.use import memory_use
from headway.trainer.arguments import TrainingArguments
from headway.trainer.callbacks import Events
from headway.trainer.results import Metrics


class Log:
    """Logs what is found outside a training; once something was trained, it belongs to that run's log.

    Args:
        args: names and places.
        accelerator: whose run's log it is.
        events: told of the values; keeps their history.
    """

    def __init__(self, args: TrainingArguments, accelerator: Accelerator, events: Events) -> None:
        self._args = args
        self._accelerator = accelerator
        self._events = events

    def begin(self) -> None:
        """Begin the run's log and its trackers, or go on with them."""
        args = self._args
        folder = Path(args.output_dir or ".").absolute()
        name = folder.name if args.logging_dir is None else args.run_name or folder.name
        self._accelerator.init_trackers(name, config=args.to_dict())

    def write(self, values: Metrics) -> None:
        """Log values; their `epoch` is added to them."""
        self._note(values)
        if self._accelerator.num_updates:
            self.begin()
            self._accelerator.log(values, step=self._events.state.global_step)
            self._accelerator.end_trackers()

    def _note(self, values: Metrics) -> None:
        state = self._events.state
        values.setdefault("epoch", round(state.epoch, 6))
        state.log_history.append({**values, "step": state.global_step})
        self._events.tell("on_log", logs=values)

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Count the memory of the block as a phase of its own, where phases are counted."""
        return nullcontext()


class TrainingLog(Log):
    """The log of a training in progress.

    Args:
        args, accelerator, events: as for every log.
        monitor: measures the training's memory.
    """

    def __init__(
        self, args: TrainingArguments, accelerator: Accelerator, events: Events, monitor: MemoryMonitor
    ) -> None:
        super().__init__(args, accelerator, events)
        self._monitor = monitor
        self._counts_phases = not args.skip_memory_metrics

    def write(self, values: Metrics) -> None:
        """Log values, and with them the memory; with a loss the pace since the last one too."""
        self._note(values)
        peaks = self.peaks("memory_peak", "memory/")
        used = {"memory": memory_use(self._accelerator.device).used, **peaks}
        found = {name: float(value) for name, value in used.items()}
        if "loss" in values:
            found |= self._accelerator.throughput.values()
        self._accelerator.log({**values, **found}, step=self._events.state.global_step)

    def peaks(self, name: str, prefix: str) -> dict[str, int]:
        """The peak under that name, and that of each phase with the prefix, in bytes."""
        phases = self._monitor.peaks.items() if self._counts_phases else ()
        return {name: self._monitor.peak} | {f"{prefix}{phase}": peak for phase, peak in phases}

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Count the memory of the block as a phase of its own, where phases are counted."""
        return self._monitor.phase(name) if self._counts_phases else nullcontext()
