"""Loop of one training run: forward, backward, update, and the actions after an update such as logging."""

import math
import sys
import time
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
from headway.trainer.callbacks import CallbackHandler, TrainerState
from headway.trainer.checkpoints import load_weights, make_checkpoint_path, record_if_best
from headway.trainer.data import Batch, get_length
from headway.trainer.embedding_noise import EmbeddingNoise
from headway.trainer.logs import TrainingLog
from headway.trainer.loss import split_label_count
from headway.trainer.loss_book import LossBook
from headway.trainer.missing_updates import MissingUpdates
from headway.trainer.results import Metrics, TrainOutput, compute_speed
from headway.trainer.rules import EarlyStoppingCallback
from headway.trainer.schedule_free import has_modes, set_optimizer_mode
from headway.trainer.source_losses import mask_padding, split_sources
from headway.trainer.tokens import TokenCounter

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
        embedding_noise: Noise of NEFTune, or None.
    """

    accelerator: Accelerator
    model: torch.nn.Module
    optimizer: PreparedOptimizer
    scheduler: PreparedScheduler
    loader: PreparedLoader
    average: ExponentialMovingAverage | None = None
    embedding_noise: EmbeddingNoise | None = None

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
        callback_handler: Handler of the callbacks, with state and control.
        log: Log of the run.
        losses: Recorder of the training losses.
        tokens: Counter of the tokens in the training batches.
        methods: Trainer, whose methods a subclass may override.
        ignore_keys: Names of model outputs that are not predictions. None: those that the model's config names.

    Attributes:
        newest_checkpoint: Path of the newest checkpoint of this training run; "" before the first checkpoint.
    """

    def __init__(
        self,
        args: TrainingArguments,
        prepared: PreparedTraining,
        callback_handler: CallbackHandler,
        log: TrainingLog,
        losses: LossBook,
        tokens: TokenCounter,
        methods: TrainingMethods,
        ignore_keys: list[str] | None,
    ) -> None:
        self.newest_checkpoint = ""
        self._args = args
        self._prepared = prepared
        self._accelerator = prepared.accelerator
        self._model = prepared.model
        self._loader = prepared.loader
        self._callback_handler = callback_handler
        self._log = log
        self._losses = losses
        self._methods = methods
        self._ignore_keys = ignore_keys
        self._missing_updates = MissingUpdates(prepared.accelerator.clock, args.label_names or ())
        self._tokens = tokens
        self._start_time = time.monotonic()
        self._num_samples = 0  # of all ranks, since the start or resume
        # Numbers of completed updates: at the start or resume, at the newest checkpoint (-1: none was saved), and at the
        # evaluation that `run` made before the first update (-1: it made none)
        self._first_update = callback_handler.state.global_step
        self._last_saved = -1
        self._last_early_evaluation = -1
        self._has_user_callbacks = False  # whether any rank has them
        self._has_modes = has_modes(prepared.optimizer)  # whether the optimizer is schedule-free

    def run(self) -> TrainOutput:
        """Run all epochs and return the results. The Trainer's docstring shows the order of the handler."""
        args, handler = self._args, self._callback_handler
        self._model.train()
        self._tokens.start_run()
        handler.call_event("on_train_begin")
        if self._accelerator.num_processes > 1:
            self._has_user_callbacks = self._has_any_user_callbacks()
        self._synchronize_control()
        if args.eval_on_start and not handler.state.global_step:
            handler.control.should_evaluate = True
        has_evaluation = handler.control.should_evaluate
        self._log_evaluate_and_save()  # includes an evaluation that was interrupted before the run was resumed
        self._last_early_evaluation = handler.state.global_step if has_evaluation else -1
        # With `max_steps`, only the number of updates ends the run.
        num_epochs = sys.maxsize if args.max_steps > 0 else handler.state.num_train_epochs
        if not handler.control.should_training_stop:
            for epoch in self._accelerator.epochs(num_epochs):
                handler.control.should_epoch_stop = False
                handler.state.owes_epoch_end = True
                handler.call_event("on_epoch_begin")
                self._train_epoch(epoch)
                if self._loader.is_stopped:  # stopped early, for example by the guard against non-finite losses
                    break
                self._end_epoch()
                if handler.control.should_training_stop:
                    break
        elif (
            handler.state.owes_epoch_end
        ):  # the run ended between the last update's checkpoint and the end of its epoch
            self._end_epoch()
        return self._finish_training()

    def _has_any_user_callbacks(self) -> bool:
        """Whether any rank has callbacks of the user, which a script may add on its main process only.

        Every rank must call it. The Trainer's own callback for early stopping counts, too, if some ranks lack it.
        """
        num_stopping = sum(isinstance(callback, EarlyStoppingCallback) for callback in self._callback_handler.callbacks)
        # The largest of the negated numbers shows the smallest number.
        any_user_callbacks, largest, negated_smallest = self._accelerator.collectives.reduce_numbers(
            [self._callback_handler.has_user_callbacks, num_stopping, -num_stopping], "max"
        )
        return bool(any_user_callbacks) or largest != -negated_smallest

    def _end_epoch(self) -> None:
        """Call the callbacks' `on_epoch_end`, then log, evaluate and save if that is due."""
        self._callback_handler.state.owes_epoch_end = False
        self._callback_handler.call_event("on_epoch_end")
        self._synchronize_control()
        self._log_evaluate_and_save()

    def _train_epoch(self, epoch: int) -> None:
        """Train on one pass over the data. After a resume, train on the remaining batches of the epoch.

        Raises:
            DataError: If an epoch that was not resumed has no batch, or no label that counts. Also if the last 1000
                accumulation windows had no label that counts.
            StateError: If there was no update in the last 1000 accumulation windows for another reason.
        """
        loader, accelerator, handler = self._loader, self._accelerator, self._callback_handler
        state, num_batches = handler.state, self._prepared.num_batches
        # After an epoch that was ended early, `num_consumed` still has the number of that epoch.
        num_consumed = loader.num_consumed if loader.is_unfinished else 0
        num_done = num_consumed // loader.total_batch_size if loader.total_batch_size else 0  # batches
        is_resumed = num_consumed > 0
        index = num_done
        for index, batch in enumerate(loader, num_done + 1):
            if accelerator.sync_gradients:
                handler.call_event("on_step_begin")
            self._train_on_batch(batch)
            # Without a length, the epoch is taken to be as long as the training.
            state.epoch = epoch + index / (num_batches or state.max_steps * accelerator.gradient_accumulation_steps)
            self._num_samples += sum(loader.valid_counts or ())
            if accelerator.num_updates == state.global_step:
                if accelerator.sync_gradients:
                    self._missing_updates.record_missing_update(batch)
                handler.call_event("on_substep_end")
                continue  # only updates are followed by actions, so the ranks need not combine their flags here
            self._missing_updates.record_update()
            if self._prepared.embedding_noise is not None:
                self._prepared.embedding_noise.warn_if_unused()
            state.global_step = accelerator.num_updates
            if self._tokens.has_state and (self._has_user_callbacks or handler.has_user_callbacks):
                self._tokens.read_totals(state)  # callbacks may read the state
            handler.call_event("on_step_end")
            if accelerator.preempted:  # only with Preemption(exits=False); otherwise the process has exited
                handler.control.should_save = True
                handler.control.should_training_stop = True
            self._synchronize_control()
            self._log_evaluate_and_save()
            if handler.control.should_epoch_stop or handler.control.should_training_stop:
                break
        else:
            if not loader.is_stopped:
                state.epoch = epoch + 1.0
        if is_resumed or loader.is_stopped:
            return
        if index == num_done:
            raise DataError("an epoch of the training data had no batch; give data, or fewer max_steps")
        self._missing_updates.check_epoch()

    def _train_on_batch(self, batch: Batch) -> None:
        """Run forward and backward on a batch. If it ends the accumulation window, make the update."""
        accelerator, loader = self._accelerator, self._loader
        if self._has_modes:
            self._prepared.optimizer.train()  # a resumed run, an evaluation or a save has set it to evaluation mode
        num_rows = loader.num_rows or 1
        self._tokens.count_batch(batch, loader.num_rows, loader.num_valid)
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
        self._callback_handler.call_event("on_pre_optimizer_step")
        values["learning_rate"] = float(optimizer.param_groups[0]["lr"])
        if self._has_modes:
            optimizer.train()  # a callback may have evaluated
        optimizer.step()
        self._callback_handler.call_event("on_optimizer_step")
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
        accelerator, handler = self._accelerator, self._callback_handler
        if accelerator.num_processes > 1 and (self._has_user_callbacks or handler.has_user_callbacks):
            # Reduce on the host, so that the host does not wait for the device.
            flags = accelerator.collectives.reduce_numbers([float(flag) for flag in handler.control.flags()], "max")
            handler.control.set_flags([flag > 0 for flag in flags])

    def _log_evaluate_and_save(self) -> None:
        """Log, evaluate and save if the control's flags request it, and clear these flags.

        No update is logged or saved twice. A resumed run first executes a log entry, an evaluation and a save that were
        still pending when its checkpoint was saved. If an epoch ends at that update, the evaluation is not repeated.
        """
        # A callback may replace `handler.control`, so it is read anew after each event.
        handler, state = self._callback_handler, self._callback_handler.state
        is_any_due = handler.control.should_log or handler.control.should_evaluate or handler.control.should_save
        if self._tokens.has_state and is_any_due:
            self._tokens.read_totals(state)
        if handler.control.should_log and state.global_step > self._losses.last_logged:
            self._log_training()
            self._synchronize_control()
        handler.control.should_log = False
        metrics: Metrics = {}
        if handler.control.should_evaluate and state.global_step != self._last_early_evaluation:
            metrics = self._run_evaluation()
        handler.control.should_evaluate = False
        is_save_due = handler.control.should_save and state.global_step != self._last_saved
        handler.control.should_save = False
        if is_save_due:
            self._save_checkpoint(metrics)
            self._synchronize_control()

    def _run_evaluation(self) -> Metrics:
        """Evaluate, record the result if it is the best one, and step a schedule that depends on the metric."""
        if self._ignore_keys is None:  # a subclass's `evaluate` might not accept `ignore_keys`
            metrics = self._methods.evaluate()
        else:
            metrics = self._methods.evaluate(ignore_keys=self._ignore_keys)
        self._synchronize_control()
        args, control, state = self._args, self._callback_handler.control, self._callback_handler.state
        is_saved = state.global_step == self._last_saved
        # Weights that are to be loaded at the end must have been saved.
        will_be_saved = args.save_strategy == "best" or control.should_save
        can_be_best = not args.load_best_model_at_end or is_saved or will_be_saved
        is_best = can_be_best and record_if_best(state, args, metrics)
        if is_best and is_saved:
            state.best_model_checkpoint = self.newest_checkpoint
        # As in transformers, an evaluation before the first update (`eval_on_start`) does not step the schedule.
        if self._prepared.has_metric_schedule and state.global_step:
            self._prepared.scheduler.step(metrics[args.wanted_metric or "eval_loss"])
        if args.save_strategy == "best":
            control.should_save |= is_best
        return metrics

    def _log_training(self) -> None:
        """Log the mean loss since the last log, the learning rates and other values of the update."""
        loss = self._losses.pop_mean()
        logs: Metrics = {} if loss is None else {"loss": loss}
        if self._losses.source_book is not None:
            logs |= self._losses.source_book.pop_means()
        logs |= {name: float(value) for name, value in self._losses.update_values.items()}
        if num_skipped := self._accelerator.clock.num_skipped:
            logs["skipped_updates"] = num_skipped
        self._losses.last_logged = self._callback_handler.state.global_step
        self._log.totals.update(self._tokens.read_totals(self._callback_handler.state))
        self._methods.log(logs)

    def _save_checkpoint(self, metrics: Metrics) -> None:
        """Start saving a checkpoint. It is written in the background.

        Args:
            metrics: Metrics of the evaluation at this update, by which the best checkpoint is selected. Empty if there
                was no evaluation.
        """
        state, args, accelerator = self._callback_handler.state, self._args, self._accelerator
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
        self._callback_handler.call_event("on_save")

    # ---------------------------------------------------------------- the end

    def _finish_training(self) -> TrainOutput:
        """End the training: load the best or the averaged weights, log the speed and the mean loss, and call `on_train_end`.

        Returns:
            The result of `Trainer.train`.
        """
        accelerator, state, args = self._accelerator, self._callback_handler.state, self._args
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
        if self._tokens.has_state:
            self._tokens.read_totals(state)
            metrics["num_input_tokens_seen"] = state.num_input_tokens_seen
        self._methods.log(dict(metrics))
        self._callback_handler.call_event("on_train_end")
        accelerator.end_trackers()
        return TrainOutput(state.global_step, metrics["train_loss"], metrics)
