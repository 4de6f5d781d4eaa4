"""The half of the Trainer that tells: callbacks, the log and its trackers, memory."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from headway.accelerator import Accelerator
from headway.memory.monitor import MemoryMonitor
from headway.memory.use import memory_use
from headway.trainer.arguments import TrainingArguments
from headway.trainer.callbacks import Callbacks, TrainerControl, TrainerState


class Reporting:
    """What a Trainer tells, and whom.

    Attributes:
        args: the arguments.
        accelerator: of the training in progress, or of the last one.
        state: how far the training is.
        control: what the loop does next.
        optimizer, lr_scheduler: as they were given or made; what was made is let go of when the training ends.
        train_dataloader: of the training in progress.
        processing_class: the tokenizer or the like that belongs to the data.
        is_in_train: is a training in progress?
    """

    args: TrainingArguments
    accelerator: Accelerator
    state: TrainerState
    control: TrainerControl
    callbacks: Callbacks
    model: Any
    optimizer: Any
    lr_scheduler: Any
    processing_class: Any
    train_dataloader: Any
    is_in_train: bool
    _monitor: MemoryMonitor | None = None

    def is_world_process_zero(self) -> bool:
        """Is this process rank 0 of all machines?"""
        return self.accelerator.is_main_process

    def is_local_process_zero(self) -> bool:
        """Is this the first process of its machine?"""
        return self.accelerator.is_local_main_process

    # ---------------------------------------------------------------- callbacks

    def tell(self, event: str, **more: Any) -> None:
        """Tell the callbacks of an event; they may change the control."""
        self.control = self.callbacks.tell(event, self.args, self.state, self.control, **more)

    def _about(self) -> dict[str, Any]:
        return {
            "model": self.model, "processing_class": self.processing_class, "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler, "train_dataloader": self.train_dataloader,
        }  # fmt: skip

    def add_callback(self, callback: Any) -> None:
        """Add a callback: an object, or a class to make one of."""
        self.callbacks.add(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Take out a callback, by object or class, and return it; None where there is none."""
        return self.callbacks.pop(callback)

    def remove_callback(self, callback: Any) -> None:
        """Take out a callback, by object or class."""
        self.callbacks.pop(callback)

    # ---------------------------------------------------------------- the log

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Log values: to `state.log_history`, callbacks, the run's log and its trackers.

        Args:
            logs: by name; `epoch` is added.
            start_time: accepted for the name's sake.
        """
        logs.setdefault("epoch", round(self.state.epoch, 6))
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.tell("on_log", logs=logs)
        if self.is_in_train:
            self.accelerator.log({**logs, **self._measures(logs)}, step=self.state.global_step)
        elif self.accelerator.num_updates:  # an evaluation after the training belongs to its run
            self.begin_run()
            self.accelerator.log(logs, step=self.state.global_step)
            self.accelerator.end_trackers()

    def begin_run(self) -> None:
        """Begin the run's log and its trackers, or go on with them."""
        args = self.args
        place = (
            Path(args.output_dir or ".").absolute() if args.logging_dir is None else Path(args.logging_dir).absolute()
        )
        name = place.name if args.logging_dir is None else args.run_name or Path(args.output_dir or ".").absolute().name
        self.accelerator.init_trackers(name, config=args.to_dict())

    def _measures(self, logs: dict[str, Any]) -> dict[str, float]:
        """What the run's log has beside the values: memory, and with a loss the pace since the last one."""
        found = {"memory": float(memory_use(self.accelerator.device).used)}
        if self._monitor is not None:
            found["memory_peak"] = float(self._monitor.peak)
            if not self.args.skip_memory_metrics:
                found |= {f"memory/{phase}": float(peak) for phase, peak in self._monitor.peaks.items()}
        return found | (self.accelerator.throughput.values() if "loss" in logs else {})

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Count the memory of the block as a phase of its own."""
        return nullcontext() if self._monitor is None or self.args.skip_memory_metrics else self._monitor.phase(name)
