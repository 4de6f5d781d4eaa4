"""Loop of one training run: forward, backward, update, and the actions after an update such as logging."""

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from headway.accelerator import Accelerator
from headway.core.data.loader import PreparedLoader
from headway.core.runtime.collectives.tree import find_batch_size
from headway.core.training.prepared.optimizer import PreparedOptimizer
from headway.core.training.prepared.scheduler import PreparedScheduler
from headway.errors import ConfigError, DataError
from headway.extras.moving_average import ExponentialMovingAverage
from headway.log import get_logger
from headway.trainer.arguments import TrainingArguments
from headway.trainer.callbacks import Events, TrainerState
from headway.trainer.checkpoints import load_weights, make_checkpoint_path, record_if_best
from headway.trainer.data import Batch, get_length
from headway.trainer.logs import TrainingLog
from headway.trainer.loss import split_label_count
from headway.trainer.loss_book import LossBook
from headway.trainer.optimizer import has_modes, set_optimizer_mode
from headway.trainer.results import Metrics, TrainOutput, compute_speed
from headway.trainer.rules import EarlyStoppingCallback
from headway.trainer.source_losses import mask_padding, split_sources

log = get_logger(__name__)


class TrainingMethods(Protocol):
    """Interface of the Trainer's methods that the loop calls and that a subclass may override."""

    def training_step(
        self, model: torch.nn.Module, inputs: Batch, num_items_in_batch: int | None = None
    ) -> torch.Tensor:
        """Run forward and backward of a micro-batch, and return its detached loss.

        Args:
            model: Prepared model.
            inputs: Micro-batch on the device.
            num_items_in_batch: Number of labels that are not ignored. None: the loss is a mean over samples.
        """

    def evaluate(self, *, ignore_keys: list[str] | None = None) -> Metrics:
        """Evaluate the model on the Trainer's evaluation data, and return the metrics by name.

        Args:
            ignore_keys: Names of model outputs that are not predictions. None: those that the model's config names.
        """

    def log(self, logs: Metrics) -> None:
        """Log values by name to the history, the callbacks and the run's log."""


@dataclass(frozen=True)
class PreparedTraining:
    """Objects of a training run that one Accelerator has prepared.

    Attributes:
        accelerator: Accelerator that has prepared the other objects.
        model: Prepared model.
        optimizer: Prepared optimizer.
        scheduler: Prepared scheduler.
        loader: Prepared loader of the training data.
        average: Average of the model's weights, or None.
    """

    accelerator: Accelerator
    model: torch.nn.Module
    optimizer: PreparedOptimizer
    scheduler: PreparedScheduler
    loader: PreparedLoader
    average: ExponentialMovingAverage | None = None

    @property
    def num_batches(self) -> int | None:
        """Number of batches per epoch on each rank; None for an iterable dataset."""
        return get_length(self.loader)

    @property
    def has_metric_schedule(self) -> bool:
        """Whether the learning-rate schedule depends on a metric and not on the number of updates.

        This is the case for ReduceLROnPlateau.
        """
        return isinstance(self.scheduler.scheduler, ReduceLROnPlateau)


def count_updates(state: TrainerState, args: TrainingArguments, num_batches: int | None, num_steps: int) -> None:
    """Compute how many epochs and updates a training run has, and store the numbers in its state.

    The intervals of logging, evaluation and saving are stored, too, in updates.

    Args:
        state: State to change.
        args: Arguments of the training run.
        num_batches: Batches per epoch on each rank; None for an iterable dataset.
        num_steps: Batches per update.

    Raises:
        ConfigError: If `max_steps` is not set and the data has no length or contains no batches.
    """
    if not num_batches:
        if args.max_steps <= 0:
            problem = "has no length" if num_batches is None else "has no batch"
            raise ConfigError(f"the training data {problem}, so epochs cannot be counted; set max_steps, or give data")
        state.max_steps = args.max_steps
        state.num_train_epochs = 1
    else:
        updates_per_epoch = math.ceil(num_batches / num_steps)
        if args.max_steps > 0:
            state.max_steps = args.max_steps
            state.num_train_epochs = math.ceil(args.max_steps / updates_per_epoch)
        else:
            state.max_steps = math.ceil(args.num_train_epochs * updates_per_epoch)
            state.num_train_epochs = math.ceil(args.num_train_epochs)
    state.logging_steps = args.get_interval("logging_steps", state.max_steps)
    state.eval_steps = args.get_interval("eval_steps", state.max_steps)
    state.save_steps = args.get_interval("save_steps", state.max_steps)


class Training:
    """One training run, from its first update to its last.

    Args:
        args: Arguments of the training run.
        prepared: Prepared model, optimizer, scheduler and loader.
        events: Dispatcher of the events, with state and control.
        log: Log of the run.
        losses: Recorder of the training losses.
        methods: Trainer, whose methods a subclass may override.
        ignore_keys: Names of model outputs that are not predictions. None: those that the model's config names.

    Attributes:
        newest_checkpoint: Path of the newest checkpoint of this training run; "" before the first checkpoint.
    """

    def __init__(
        self,
        args: TrainingArguments,
        prepared: PreparedTraining,
        events: Events,
        log: TrainingLog,
        losses: LossBook,
        methods: TrainingMethods,
        ignore_keys: list[str] | None,
    ) -> None:
        self.newest_checkpoint = ""
        self._args = args
        self._prepared = prepared
        self._accelerator = prepared.accelerator
        self._model = prepared.model
        self._loader = prepared.loader
        self._events = events
        self._log = log
        self._losses = losses
        self._methods = methods
        self._ignore_keys = ignore_keys
        self._meter = prepared.accelerator.throughput
        self._start_time = time.monotonic()
        self._num_samples = 0
        # Numbers of updates; -1: none
        self._first_update = events.state.global_step
        self._last_saved = -1
        self._pending_evaluation = -1  # whose evaluation was pending when the run was resumed, and has been made
        self._has_user_callbacks = False  # on any rank
        self._has_modes = has_modes(prepared.optimizer)  # only a schedule-free optimizer has them

    def run(self) -> TrainOutput:
        """Run all epochs and return the results. The Trainer's docstring shows the order of the events."""
        args, events = self._args, self._events
        self._model.train()
        events.call_event("on_train_begin")
        if self._accelerator.num_processes > 1:  # a script may add a callback on its main process only
            num_stopping = sum(isinstance(callback, EarlyStoppingCallback) for callback in events.all)
            has_user_callbacks, most, least = self._accelerator.collectives.reduce_numbers(
                [events.has_user_callbacks, num_stopping, -num_stopping], "max"
            )
            self._has_user_callbacks = bool(has_user_callbacks) or most != -least
        self._synchronize_control()
        if args.eval_on_start and not events.state.global_step:
            events.control.should_evaluate = True
        has_evaluation = events.control.should_evaluate
        self._log_evaluate_and_save()  # includes an evaluation that was interrupted before the run was resumed
        self._pending_evaluation = events.state.global_step if has_evaluation else -1
        # With `max_steps`, only the number of updates ends the run.
        num_epochs = sys.maxsize if args.max_steps > 0 else events.state.num_train_epochs
        if not events.control.should_training_stop:
            for epoch in self._accelerator.epochs(num_epochs):
                events.control.should_epoch_stop = False
                events.state.owes_epoch_end = True
                events.call_event("on_epoch_begin")
                self._train_epoch(epoch)
                if self._loader.is_stopped:  # stopped early, for example by the guard against non-finite losses
                    break
                self._end_epoch()
                if events.control.should_training_stop:
                    break
        elif events.state.owes_epoch_end:  # the run ended between the last update's checkpoint and the end of its epoch
            self._end_epoch()
        return self._finish_training()

    def _end_epoch(self) -> None:
        self._events.state.owes_epoch_end = False
        self._events.call_event("on_epoch_end")
        self._synchronize_control()
        self._log_evaluate_and_save()

    def _train_epoch(self, epoch: int) -> None:
        """Train on one pass over the data. After a resume, train on the remaining batches of the epoch.

        Raises:
            DataError: If an epoch that was not resumed has no batch.
        """
        loader, accelerator, events = self._loader, self._accelerator, self._events
        state, num_batches = events.state, self._prepared.num_batches
        num_consumed = loader.num_consumed if loader.is_unfinished else 0  # else, it is that of an epoch that was left
        num_done = num_consumed // loader.total_batch_size if loader.total_batch_size else 0
        index, is_resumed = num_done, num_consumed > 0
        for index, batch in enumerate(loader, num_done + 1):
            if accelerator.sync_gradients:
                events.call_event("on_step_begin")
            self._train_on_batch(batch)
            # Without a length, the epoch is taken to be as long as the training.
            state.epoch = epoch + index / (num_batches or state.max_steps * accelerator.gradient_accumulation_steps)
            self._num_samples += sum(loader.valid_counts or ())
            if accelerator.num_updates == state.global_step:
                events.call_event("on_substep_end")
                continue  # only updates are followed by actions, so the ranks need not combine their flags here
            state.global_step = accelerator.num_updates
            events.call_event("on_step_end")
            if accelerator.preempted:  # only with Preemption(exits=False); otherwise the process has exited
                events.control.should_save = True
                events.control.should_training_stop = True
            self._synchronize_control()
            self._log_evaluate_and_save()
            if events.control.should_epoch_stop or events.control.should_training_stop:
                break
        else:
            if not loader.is_stopped:
                state.epoch = epoch + 1.0
        if index == num_done and not is_resumed and not loader.is_stopped:
            raise DataError("an epoch of the training data had no batch; give data, or fewer max_steps")

    def _train_on_batch(self, batch: Batch) -> None:
        """Run forward and backward on a batch. If it ends the accumulation window, make the update."""
        accelerator, loader = self._accelerator, self._loader
        if self._has_modes:
            self._prepared.optimizer.train()  # a resumed run, an evaluation or a save has set it to evaluation mode
        num_rows = loader.num_rows or 1
        if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), torch.Tensor):
            self._meter.add(tokens=batch["input_ids"].numel())
        source_book = self._losses.source_book
        if source_book is not None:
            batch = mask_padding(batch, loader.num_valid)
        for piece in accelerator.microbatches(batch):
            with accelerator.accumulate(self._model):
                rows = num_rows if piece is batch else find_batch_size(piece) or num_rows
                inputs, weight = split_label_count(piece)
                if source_book is not None:
                    inputs, sources = split_sources(inputs)
                    source_book.begin_piece(sources)
                loss = self._methods.training_step(self._model, inputs, weight)
                # Rows that only pad the batch do not count. A batch of such rows alone has no weight.
                num_valid = num_rows if loader.num_valid is None else loader.num_valid
                if weight is None or num_valid == 0:
                    loss_weight = num_valid * rows / num_rows
                else:
                    loss_weight = float(weight)
                self._losses.add_loss(loss, loss_weight, rows)
                if accelerator.sync_gradients:
                    self._run_update()
        self._losses.end_batch(num_rows)
        if accelerator.sync_gradients:
            self._losses.end_window()

    def _run_update(self) -> None:
        """Clip gradients, step the optimizer and the schedule, and clear gradients, with the events in between."""
        optimizer, limit, values = self._prepared.optimizer, self._args.max_grad_norm, self._losses.update_values
        if limit:
            values["grad_norm"] = self._accelerator.clip_grad_norm_(self._model.parameters(), limit)
        self._events.call_event("on_pre_optimizer_step")
        values["learning_rate"] = float(optimizer.param_groups[0]["lr"])
        if self._has_modes:
            optimizer.train()  # a callback may have evaluated
        optimizer.step()
        self._events.call_event("on_optimizer_step")
        if not self._prepared.has_metric_schedule:
            self._prepared.scheduler.step()
        optimizer.zero_grad()

    # ---------------------------------------------------------------- after an update

    def _synchronize_control(self) -> None:
        """Combine the control flags of all ranks, so that a request by any rank's callbacks applies to all ranks.

        Call it after each event whose callbacks may change a flag, before the flag is read. It does nothing in a
        single-process run, or if all ranks have the same callbacks and all of these are Headway's own, because their
        requests do not differ between ranks.
        """
        accelerator, events = self._accelerator, self._events
        if accelerator.num_processes > 1 and (self._has_user_callbacks or events.has_user_callbacks):
            # Reduce on the host, so that the host does not wait for the device.
            flags = accelerator.collectives.reduce_numbers([float(flag) for flag in events.control.flags()], "max")
            events.control.set_flags([flag > 0 for flag in flags])

    def _log_evaluate_and_save(self) -> None:
        """Log, evaluate and save if the control's flags request it, and clear these flags.

        No update is logged or saved twice. A resumed run first executes a log entry, an evaluation and a save that were
        still pending when its checkpoint was saved. If an epoch ends at that update, the evaluation is not repeated.
        """
        events, state = self._events, self._events.state
        if events.control.should_log and state.global_step > self._losses.last_logged:
            self._log_training()
            self._synchronize_control()
        events.control.should_log = False
        metrics: Metrics = {}
        if events.control.should_evaluate and state.global_step != self._pending_evaluation:
            metrics = self._run_evaluation()
        events.control.should_evaluate = False
        is_save_due = events.control.should_save and state.global_step != self._last_saved
        events.control.should_save = False
        if is_save_due:
            self._save_checkpoint(metrics)
            self._synchronize_control()

    def _run_evaluation(self) -> Metrics:
        """Evaluate, record the result if it is the best one, and step a schedule that depends on the metric."""
        # Pass `ignore_keys` only if it is set, because a subclass's `evaluate` might not accept it.
        metrics = (
            self._methods.evaluate()
            if self._ignore_keys is None
            else self._methods.evaluate(ignore_keys=self._ignore_keys)
        )
        self._synchronize_control()
        args, control, state = self._args, self._events.control, self._events.state
        is_saved = state.global_step == self._last_saved
        # Weights that are to be loaded at the end must have been saved.
        will_be_saved = args.save_strategy == "best" or control.should_save
        can_be_best = not args.load_best_model_at_end or is_saved or will_be_saved
        is_best = can_be_best and record_if_best(state, args, metrics)
        if is_best and is_saved:
            state.best_model_checkpoint = self.newest_checkpoint
        if (
            self._prepared.has_metric_schedule and state.global_step
        ):  # as in transformers, `eval_on_start` does not count
            self._prepared.scheduler.step(metrics[args.wanted_metric or "eval_loss"])
        if args.save_strategy == "best":
            control.should_save |= is_best
        return metrics

    def _log_training(self) -> None:
        loss = self._losses.pop_mean()
        logs: Metrics = {} if loss is None else {"loss": loss}
        if self._losses.source_book is not None:
            logs |= self._losses.source_book.pop_means()
        logs |= {name: float(value) for name, value in self._losses.update_values.items()}
        if num_skipped := self._accelerator.clock.num_skipped:
            logs["skipped_updates"] = num_skipped
        self._losses.last_logged = self._events.state.global_step
        self._methods.log(logs)

    def _save_checkpoint(self, metrics: Metrics) -> None:
        """Start saving a checkpoint. It is written in the background.

        Args:
            metrics: Metrics of the evaluation at this update, by which the best checkpoint is selected. Empty if there
                was no evaluation.
        """
        state, args, accelerator = self._events.state, self._args, self._accelerator
        value = metrics.get(args.wanted_metric or "")
        metric = None if value is None or math.isnan(value) else float(value)
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = str(
                make_checkpoint_path(accelerator.project_dir or ".", accelerator.save_iteration)
            )
        set_optimizer_mode(self._prepared.optimizer, is_training=False)
        # The next training step changes the weights of a schedule-free optimizer before its forward, so a copy that is
        # taken during that forward would be too late.
        is_blocking = self._has_modes and accelerator.project_configuration.overlap_saves
        self.newest_checkpoint = str(accelerator.save_state(blocking=is_blocking, metric=metric))
        self._last_saved = state.global_step
        self._events.call_event("on_save")

    # ---------------------------------------------------------------- the end

    def _finish_training(self) -> TrainOutput:
        accelerator, state, args = self._accelerator, self._events.state, self._args
        seconds = time.monotonic() - self._start_time
        accelerator.wait_for_save()
        set_optimizer_mode(self._prepared.optimizer, is_training=False)  # before other weights are loaded
        if args.load_best_model_at_end and state.best_model_checkpoint and state.best_global_step != state.global_step:
            log.info("the weights of update %s are loaded: %s", state.best_global_step, state.best_model_checkpoint)
            accelerator.strategy.free_gathered(self._model)
            load_weights(state.best_model_checkpoint, self._model, is_average=self._prepared.average is not None)
        elif self._prepared.average is not None:
            self._prepared.average.copy_to_model()
        metrics = compute_speed("train", seconds, self._num_samples, state.global_step - self._first_update)
        metrics["train_loss"] = self._losses.compute_mean()
        metrics["epoch"] = state.epoch
        metrics |= self._log.list_peaks("train_memory_peak", "train_memory_peak_")
        self._methods.log(dict(metrics))
        self._events.call_event("on_train_end")
        accelerator.end_trackers()
        return TrainOutput(state.global_step, metrics["train_loss"], metrics)
