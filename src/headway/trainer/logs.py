"""Logs of training runs and evaluations: values go to the state's history, the callbacks, the run log and the trackers."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from headway.accelerator import Accelerator
from headway.core.memory.monitor import MemoryMonitor
from headway.core.memory.use import memory_use
from headway.trainer.arguments import TrainingArguments
from headway.trainer.callbacks import CallbackHandler
from headway.trainer.results import Metrics

_NAME_ARGUMENTS = {
    "wandb": "name",
    "trackio": "name",
    "mlflow": "run_name",
    "swanlab": "experiment_name",
    "clearml": "task_name",
}
"""Name of the argument with which a tracker's package names a run, by the tracker's name."""


@dataclass(frozen=True)
class Log:
    """Log of values outside of a training run, such as the metrics of a separate evaluation.

    After a training run, the values are added to the log of that run.

    Attributes:
        args: Arguments of the Trainer, with names and folders.
        accelerator: Accelerator of the run.
        callback_handler: Handler that passes the values to callbacks and keeps their history.
    """

    args: TrainingArguments
    accelerator: Accelerator
    callback_handler: CallbackHandler

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
            self.accelerator.log(values, step=self.callback_handler.state.global_step)
            self.accelerator.end_trackers()

    def _add_to_history(self, values: Metrics) -> None:
        """Add logged values to the state's history, with the epoch and the update, and call the event `on_log`."""
        state = self.callback_handler.state
        values.setdefault("epoch", round(state.epoch, 6))
        if self.args.include_num_input_tokens_seen != "no":
            values["num_input_tokens_seen"] = state.num_input_tokens_seen
        state.log_history.append({**values, "step": state.global_step})
        self.callback_handler.call_event("on_log", logs=values)

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
        callback_handler: Handler that passes the values to callbacks and keeps their history.
        monitor: Monitor of memory use.
        totals: Samples and tokens of all ranks since the first update, by name, which the training loop updates.
    """

    monitor: MemoryMonitor
    totals: dict[str, int] = field(default_factory=dict)

    def write_values(self, values: Metrics) -> None:
        """Log values together with the memory use of this process's device in bytes.

        If the values include "loss", also log the throughput since the last entry with "loss", and the samples and
        tokens since the first update. The epoch is added to the given dict.
        """
        self._add_to_history(values)
        memory = {"memory": memory_use(self.accelerator.device).used, **self.list_peaks("memory_peak", "memory/")}
        measured = {name: float(num_bytes) for name, num_bytes in memory.items()}
        if "loss" in values:
            measured |= self.accelerator.throughput.values() | self.totals
        self.accelerator.log({**values, **measured}, step=self.callback_handler.state.global_step)

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
