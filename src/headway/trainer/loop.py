"""The loop of one training: forward, backward and update, and what follows an update. It exists while `Trainer.train` runs."""

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from headway.accelerator import Accelerator
from headway.data.loader import PreparedLoader
from headway.errors import ConfigError, DataError
from headway.log import get_logger
from headway.runtime.collectives.tree import find_batch_size
from headway.trainer.arguments import TrainingArguments
from headway.trainer.callbacks import Events, TrainerState
from headway.trainer.checkpoints import checkpoint_path, load_weights, note_best
from headway.trainer.data import Batch, length_of
from headway.trainer.loss import LossBook, take_count
from headway.trainer.results import Metrics, TrainingLog, TrainOutput, speed
from headway.training.prepared.optimizer import PreparedOptimizer
from headway.training.prepared.scheduler import PreparedScheduler

log = get_logger(__name__)


class TrainingMethods(Protocol):
    """What the loop calls of the Trainer, where a subclass may have methods of its own."""

    def training_step(
        self, model: torch.nn.Module, inputs: Batch, num_items_in_batch: int | None = None
    ) -> torch.Tensor:
        """Forward and backward of a micro-batch; returns its loss."""

    def evaluate(self, *, ignore_keys: list[str] | None = None) -> Metrics:
        """The metrics of an evaluation."""

    def log(self, logs: Metrics) -> None:
        """Log values."""


@dataclass(frozen=True)
class PreparedTraining:
    """What a training works with, prepared by one Accelerator.

    Attributes:
        accelerator: that has prepared it.
        model, optimizer, scheduler, loader: the training's.
    """

    accelerator: Accelerator
    model: torch.nn.Module
    optimizer: PreparedOptimizer
    scheduler: PreparedScheduler
    loader: PreparedLoader

    @property
    def num_batches(self) -> int | None:
        """Of an epoch on each rank; None: a stream."""
        return length_of(self.loader)

    @property
    def is_by_metric(self) -> bool:
        """Does the schedule follow a metric instead of updates?"""
        return isinstance(self.scheduler.scheduler, ReduceLROnPlateau)


def count_updates(state: TrainerState, args: TrainingArguments, num_batches: int | None, num_steps: int) -> None:
    """Note how many epochs and updates there will be.

    Args:
        state: takes the numbers.
        args: how long to train.
        num_batches: of an epoch on each rank; None: a stream.
        num_steps: batches of an update.

    Raises:
        ConfigError: a stream without max_steps.
    """
    if not num_batches:
        if args.max_steps <= 0:
            what = "has no length" if num_batches is None else "has no batch"
            raise ConfigError(f"the training data {what}, so epochs cannot be counted; set max_steps, or give data")
        state.max_steps, state.num_train_epochs = args.max_steps, 1
    else:
        per_epoch = -(-num_batches // num_steps)
        if args.max_steps > 0:
            state.max_steps, state.num_train_epochs = args.max_steps, -(-args.max_steps // per_epoch)
        else:
            state.max_steps = math.ceil(args.num_train_epochs * per_epoch)
            state.num_train_epochs = math.ceil(args.num_train_epochs)
    state.logging_steps, state.eval_steps, state.save_steps = (
        args.interval(name, state.max_steps) for name in ("logging_steps", "eval_steps", "save_steps")
    )


class Training:
    """One training, from its first update to its last.

    Args:
        args: how it trains.
        prepared: what it works with.
        events: told of what happens; keeps the state and the control.
        log: the run's.
        losses: takes those of the updates.
        steps: the Trainer's methods that may be overridden.
        ignored: outputs of the model that are not predictions; None: what its config says.

    Attributes:
        newest: the checkpoint last taken; empty before the first.
    """

    def __init__(
        self,
        args: TrainingArguments,
        prepared: PreparedTraining,
        events: Events,
        log: TrainingLog,
        losses: LossBook,
        steps: TrainingMethods,
        ignored: list[str] | None,
    ) -> None:
        self.newest = ""
        self._args = args
        self._prepared = prepared
        self._accelerator, self._model, self._loader = prepared.accelerator, prepared.model, prepared.loader
        self._events = events
        self._log = log
        self._losses = losses
        self._steps = steps
        self._ignored = ignored
        self._meter = prepared.accelerator.throughput
        self._began_at, self._first_update = time.monotonic(), events.state.global_step
        self._last_logged, self._last_saved = self._first_update, -1
        self._caught_up_at = -1
        self._num_samples = 0
        self._of_update: dict[str, torch.Tensor | float] = {}

    def run(self) -> TrainOutput:
        """The loop over epochs; the Trainer's docstring draws it."""
        args, events = self._args, self._events
        self._model.train()
        events.tell("on_train_begin")
        if args.eval_on_start and not events.state.global_step:
            events.control.should_evaluate = True
        owes = events.control.should_evaluate
        self._log_evaluate_and_save()  # also what a run that was asked to end in an evaluation still owes
        self._caught_up_at = events.state.global_step if owes else -1
        num_epochs = sys.maxsize if args.max_steps > 0 else events.state.num_train_epochs
        if not events.control.should_training_stop:
            for epoch in self._accelerator.epochs(num_epochs):
                events.control.should_epoch_stop = False
                events.state.owes_epoch_end = True
                events.tell("on_epoch_begin")
                self._train_epoch(epoch)
                if self._loader.is_stopped:  # by the guard against non-finite losses, or from outside
                    break
                self._end_epoch()
                if events.control.should_training_stop:
                    break
        elif events.state.owes_epoch_end:  # ended between the last update's checkpoint and the epoch's end
            self._end_epoch()
        return self._finish_training()

    def _end_epoch(self) -> None:
        self._events.state.owes_epoch_end = False
        self._events.tell("on_epoch_end")
        self._synchronize_control()
        self._log_evaluate_and_save()

    def _train_epoch(self, epoch: int) -> None:
        """One pass over the data, or what is left of it."""
        loader, accelerator, events = self._loader, self._accelerator, self._events
        state, num_batches = events.state, self._prepared.num_batches
        first = loader.num_consumed // loader.total_batch_size if loader.total_batch_size else 0
        index, is_resumed = first, loader.num_consumed > 0
        for index, batch in enumerate(loader, first + 1):
            if accelerator.sync_gradients:
                events.tell("on_step_begin")
            self._train_on_batch(batch)
            state.epoch = epoch + (index / num_batches if num_batches else index / state.max_steps)
            self._num_samples += sum(loader.valid_counts or ())
            if accelerator.num_updates == state.global_step:
                events.tell("on_substep_end")
            else:
                state.global_step = accelerator.num_updates
                events.tell("on_step_end")
                if accelerator.preempted:  # with Preemption(exits=False); else the process has ended
                    events.control.should_save = events.control.should_training_stop = True
                self._synchronize_control()
                self._log_evaluate_and_save()
            if events.control.should_epoch_stop or events.control.should_training_stop:
                break
        if index == first and not is_resumed and not loader.is_stopped:
            raise DataError("an epoch of the training data had no batch; give data, or fewer max_steps")

    def _train_on_batch(self, batch: Batch) -> None:
        """Forward and backward; and the update, where a window ends."""
        accelerator, loader = self._accelerator, self._loader
        num_rows = loader.num_rows or 1
        if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), torch.Tensor):
            self._meter.add(tokens=batch["input_ids"].numel())
        for piece in accelerator.microbatches(batch):
            with accelerator.accumulate(self._model):
                rows = num_rows if piece is batch else find_batch_size(piece) or num_rows
                inputs, weight = take_count(piece)
                loss = self._steps.training_step(self._model, inputs, weight)
                num_valid = num_rows if loader.num_valid is None else loader.num_valid
                weighed = num_valid * rows / num_rows if weight is None or not num_valid else weight
                self._losses.add(loss, float(weighed), rows)
                if accelerator.sync_gradients:
                    self._update()
        self._losses.end_batch(num_rows)
        if accelerator.sync_gradients:
            self._losses.end_window()

    def _update(self) -> None:
        optimizer, limit = self._prepared.optimizer, self._args.max_grad_norm
        if limit:
            self._of_update["grad_norm"] = self._accelerator.clip_grad_norm_(self._model.parameters(), limit)
        self._events.tell("on_pre_optimizer_step")
        self._of_update["learning_rate"] = float(optimizer.param_groups[0]["lr"])
        optimizer.step()
        self._events.tell("on_optimizer_step")
        if not self._prepared.is_by_metric:
            self._prepared.scheduler.step()
        optimizer.zero_grad()

    # ---------------------------------------------------------------- after an update

    def _synchronize_control(self) -> None:
        """Where callbacks of others decide, what one rank asks for is done by all."""
        accelerator, events = self._accelerator, self._events
        if accelerator.num_processes > 1 and events.has_foreign:
            # Over the host's own way: the device is asked for nothing.
            flags = accelerator.collectives.reduce_numbers([float(flag) for flag in events.control.flags()], "max")
            events.control.set_flags([flag > 0 for flag in flags])

    def _log_evaluate_and_save(self) -> None:
        """Log, evaluate and save as the control says; not again what was owed, where the end of an epoch comes once more."""
        events, state = self._events, self._events.state
        if events.control.should_log and state.global_step > self._last_logged:
            self._log_training()
        events.control.should_log = False
        metrics: Metrics = {}
        if events.control.should_evaluate and state.global_step != self._caught_up_at:
            metrics = self._evaluate()
        events.control.should_evaluate = False
        is_due, events.control.should_save = events.control.should_save and state.global_step != self._last_saved, False
        if is_due:
            self._save_checkpoint(metrics)

    def _evaluate(self) -> Metrics:
        # Given only where it is there: an override may not know it.
        metrics = self._steps.evaluate() if self._ignored is None else self._steps.evaluate(ignore_keys=self._ignored)
        control = self._events.control
        is_best = note_best(self._events.state, self._args, metrics)
        if self._prepared.is_by_metric:
            self._prepared.scheduler.step(metrics[self._args.wanted_metric or "eval_loss"])
        if self._args.save_strategy == "best":
            control.should_save = is_best
        return metrics

    def _log_training(self) -> None:
        loss = self._losses.take()
        logs: Metrics = {} if loss is None else {"loss": loss}
        logs |= {name: float(value) for name, value in self._of_update.items()}
        if num_skipped := self._accelerator.clock.num_skipped:
            logs["skipped_updates"] = num_skipped
        self._last_logged = self._events.state.global_step
        self._steps.log(logs)

    def _save_checkpoint(self, metrics: Metrics) -> None:
        """Take a checkpoint, and write it behind the loop."""
        state, args, accelerator = self._events.state, self._args, self._accelerator
        value = metrics.get(args.wanted_metric or "")
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = str(checkpoint_path(args.output_dir or ".", accelerator.save_iteration))
        metric = None if value is None or math.isnan(value) else float(value)
        self.newest = str(accelerator.save_state(blocking=False, metric=metric))
        self._last_saved = state.global_step
        self._events.tell("on_save")

    # ---------------------------------------------------------------- the end

    def _finish_training(self) -> TrainOutput:
        accelerator, state, args = self._accelerator, self._events.state, self._args
        seconds = time.monotonic() - self._began_at
        accelerator.wait_for_save()
        if args.load_best_model_at_end and state.best_model_checkpoint and state.best_global_step != state.global_step:
            log.info("the weights of update %s are loaded: %s", state.best_global_step, state.best_model_checkpoint)
            accelerator.strategy.at_rest(self._model)
            load_weights(state.best_model_checkpoint, self._model)
        metrics = speed("train", seconds, self._num_samples, state.global_step - self._first_update)
        metrics["train_loss"] = self._losses.mean()
        metrics["epoch"] = state.epoch
        metrics |= self._log.peaks("train_memory_peak", "train_memory_peak_")
        self._steps.log(dict(metrics))
        accelerator.end_trackers()
        self._events.tell("on_train_end")
        return TrainOutput(state.global_step, metrics["train_loss"], metrics)
