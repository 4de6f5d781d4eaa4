"""The Trainer: the whole loop, on top of the Accelerator and nothing else."""

import inspect
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from headway.errors import CheckpointError, ConfigError, DataError, Preempted
from headway.log import get_logger
from headway.memory.monitor import MemoryMonitor
from headway.ops.tree import find_batch_size
from headway.runtime.seed import set_seed
from headway.trainer.arguments import TrainingArguments
from headway.trainer.callbacks import Callbacks, TrainerControl, TrainerState
from headway.trainer.continuing import Mark, agreed, begin, leave_mark, read_mark, remove_mark
from headway.trainer.data import length_of
from headway.trainer.display import PrinterCallback, ProgressCallback
from headway.trainer.flow import DefaultFlowCallback
from headway.trainer.given import check_pairs, checked_arguments, missing_checkpoint
from headway.trainer.loss import LossFunction, take_count
from headway.trainer.losses import LossBook
from headway.trainer.other_names import NOT_SERVED, OtherNames, check_hooks
from headway.trainer.records import Record, checkpoint_path, load_weights, note_best
from headway.trainer.results import TrainOutput, speed

log = get_logger(__name__)


class Trainer(OtherNames):
    """Trains a model by `TrainingArguments`; evaluates and predicts with it.

    The whole loop, with each event of a callback where it fires::

        train():
            prepare model, optimizer, schedule, loaders                    # on_init_end was told when it was built
            check_evaluation(); resume
            on_train_begin
            for epoch in accelerator.epochs(num_epochs):
                on_epoch_begin
                for batch in train_dataloader:
                    on_step_begin                                          # a window begins
                    for piece in accelerator.microbatches(batch):          # one piece, or more where memory ran out
                        with accelerator.accumulate(model):
                            loss = compute_loss(model, piece)
                            accelerator.backward(loss, weight=number of labels that count)
                            if accelerator.sync_gradients:                 # the window ends
                                clip_grad_norm_
                                on_pre_optimizer_step
                                optimizer.step()
                                on_optimizer_step
                                scheduler.step(); optimizer.zero_grad()
                    on_substep_end, or after an update: on_step_end, and what it asked for:
                        log()              on_log
                        evaluate()         on_prediction_step for each batch, on_log, on_evaluate
                        save               on_save
                on_epoch_end, and what it asked for
            load the best weights; log()   on_log
            on_train_end

    Args:
        model: a transformers model, or any module; see `loss_function`.
        args: None: the defaults.
        data_collator: from a list of rows to a batch; None: stacks and pads.
        train_dataset, eval_dataset: of the datasets library, torch's, or lists of rows; `eval_dataset` may be a dict of several.
        processing_class: a tokenizer or the like: pads, and is saved with the model. `tokenizer` is its old name.
        model_init: makes a new model for each training, in place of `model`.
        compute_loss_func: the same as `loss_function`.
        compute_metrics: a function of an `EvalPrediction`, or an object with `update(predictions, labels)` and `compute()`,
            which keeps memory flat.
        callbacks: objects or classes.
        optimizers: (optimizer, schedule) of your own; None for either: by the arguments.
        optimizer_cls_and_kwargs: an optimizer's class and its settings.
        preprocess_logits_for_metrics: from (predictions, labels) to what is kept of the predictions.
        loss_function: `f(outputs, labels)`, a mean over the batch. None: the model's forward returns the loss.

    Raises:
        ConfigError: arguments that contradict each other.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None, train_dataset: Any = None, eval_dataset: Any = None,
        processing_class: Any = None, model_init: Callable[[], torch.nn.Module] | None = None,
        compute_loss_func: LossFunction | None = None, compute_metrics: Any = None, callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None, *,
        loss_function: LossFunction | None = None, tokenizer: Any = None,
    ) -> None:  # fmt: skip
        check_hooks(type(self))
        self.args = args = checked_arguments(model, args)
        check_pairs(
            args, compute_loss_func, loss_function, processing_class, tokenizer, optimizers, optimizer_cls_and_kwargs
        )
        if args.log_level not in (None, "passive"):
            get_logger("headway", "debug" if args.log_level == "detail" else args.log_level)
        self.accelerator = self.create_accelerator()
        set_seed(args.seed)
        self._model_init = model_init
        self._function = compute_loss_func if loss_function is None else loss_function
        self._take_model(model, model_init, self._function)
        self.processing_class = tokenizer if processing_class is None else processing_class
        self._default_collator(data_collator, self.processing_class)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self._given_optimizer, self._given_scheduler = optimizers
        self._optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.optimizer = self.lr_scheduler = self.train_dataloader = None
        self._eval_loaders = {}
        self.is_in_train, self._has_trained = False, False
        size = args.per_device_train_batch_size
        self._train_batch_size = size if isinstance(size, int) else 1
        self.state, self.control = self._new_state(), TrainerControl()
        self._takes_count = "num_items_in_batch" in inspect.signature(self.compute_loss).parameters
        shown = PrinterCallback() if args.disable_tqdm else ProgressCallback()
        self.callbacks = Callbacks([DefaultFlowCallback()], [*(callbacks or ()), shown], self._about)
        self.tell("on_init_end")

    def _new_state(self) -> TrainerState:
        return TrainerState(
            is_world_process_zero=self.accelerator.is_main_process,
            is_local_process_zero=self.accelerator.is_local_main_process,
        )

    # ---------------------------------------------------------------- train

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, trial: Any = None,
              ignore_keys_for_eval: list[str] | None = None) -> TrainOutput:  # fmt: skip
        """Train to the end; every rank calls it. A second call is a new training, from the model as it is.

        Args:
            resume_from_checkpoint: True: go on from the newest checkpoint in `output_dir` that verifies, or begin where there is
                none yet. A folder: from that one. None: as the arguments say; where those say nothing either, go on where the same
                command was asked to end (exit code 75), else begin. False: begin, whatever there is.
            trial: of a hyperparameter search: not served.
            ignore_keys_for_eval: as `ignore_keys` of the evaluations on the way.

        Returns:
            (global_step, training_loss, metrics); see `TrainOutput`.

        Raises:
            DataError: there is no data.
            CheckpointError: the folder is damaged, or does not fit.
            MemoryExhausted: not even one row fits, where memory is seen to.
        """
        args = self.args
        if trial is not None:
            raise ConfigError(f"train(trial=...): {NOT_SERVED['hyperparameter_search']}")
        self._ignored_in_evaluations = ignore_keys_for_eval
        asked = args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        self._check_folder(asked)
        self._training = begin(args.output_dir or ".")
        if self._has_trained:
            self.accelerator.end_trackers()
            self.accelerator = self.create_accelerator()
        self._has_trained = True
        set_seed(args.seed)
        if self._model_init is not None:
            self._take_model(None, self._model_init, self._function)
        if args.per_device_train_batch_size == "largest":
            self._train_batch_size = self.find_largest_batch_size()
            set_seed(args.seed)
        try:
            with MemoryMonitor(by_phase=not args.skip_memory_metrics) as self._monitor:
                self.is_in_train = True
                self._prepare()
                self.check_evaluation()
                self._resume(asked)
                output = self._train()
                if self.accelerator.preempted:  # with Preemption(exits=False)
                    self._leave_mark(self._newest, asked)
                elif self.accelerator.is_local_main_process:
                    remove_mark(args.output_dir or ".", self._training)
                return output
        except Preempted as told:
            self._leave_mark(told.checkpoint, asked)
            raise
        finally:
            self._release()

    def _prepare(self) -> None:
        """Prepare everything, always in the same order: a resumed run finds it by that."""
        accelerator, args = self.accelerator, self.args
        self.state, self.control = self._new_state(), TrainerControl()
        self.state.train_batch_size = self._train_batch_size
        self.losses = LossBook(accelerator)
        if args.gradient_checkpointing:
            plan = args.checkpointing_plan()
            accelerator.checkpoint_activations(self.model, plan.every, plan.policy, plan.offload, plan.blocks)
        self.train_dataloader = accelerator.prepare_data_loader(self.get_train_dataloader())
        self._count_updates()
        self.model.to(accelerator.device)
        self.optimizer, self.lr_scheduler = self._given_optimizer, self._given_scheduler
        self.create_optimizer_and_scheduler(self.state.max_steps)
        _, self.optimizer, self.lr_scheduler = accelerator.prepare(
            self.model, self.optimizer, self.lr_scheduler, strict=True
        )
        if args.eval_strategy != "no" or args.eval_on_start:
            for key in self.eval_dataset if isinstance(self.eval_dataset, dict) else [None]:
                self._eval_loader(key)
        record = Record(self.state, lambda: self.control, self.losses, self.callbacks)
        accelerator.register_for_checkpointing(record)
        set_seed(args.seed, device_specific=True)  # dropout differs from rank to rank

    def _count_updates(self) -> None:
        """How many epochs and updates there will be.

        Raises:
            ConfigError: a stream without max_steps.
        """
        args, state = self.args, self.state
        self._num_batches = length_of(self.train_dataloader)
        if not self._num_batches:
            if args.max_steps <= 0:
                what = "has no length" if self._num_batches is None else "has no batch"
                raise ConfigError(f"the training data {what}, so epochs cannot be counted; set max_steps, or give data")
            per_epoch = None
        else:
            per_epoch = -(-self._num_batches // args.gradient_accumulation_steps)
        if args.max_steps > 0:
            state.max_steps = args.max_steps
            state.num_train_epochs = 1 if per_epoch is None else -(-args.max_steps // per_epoch)
        else:
            assert per_epoch is not None
            state.max_steps = math.ceil(args.num_train_epochs * per_epoch)
            state.num_train_epochs = math.ceil(args.num_train_epochs)
        state.logging_steps, state.eval_steps, state.save_steps = (
            args.interval(name, state.max_steps) for name in ("logging_steps", "eval_steps", "save_steps")
        )

    def _check_folder(self, asked: str | Path | bool | None) -> None:
        """Is the folder to resume from there? Asked before anything is prepared; one machine that has it is enough."""
        if asked is not None and not isinstance(asked, bool):
            told = self.accelerator.collectives.gather_objects(missing_checkpoint(asked, self.args.output_dir or "."))
            if all(told):
                raise CheckpointError(str(told[0]))

    def _resume(self, asked: str | Path | bool | None) -> None:
        """Go on from where the arguments say, or from where the same command was asked to end."""
        accelerator, folder = self.accelerator, self.args.output_dir or "."
        mark = agreed(accelerator.collectives.gather_objects(read_mark(folder)))
        if mark is not None and mark.is_meant(self._training, asked):
            log.warning(
                "the run in %s was preempted after update %d and resumes from its newest checkpoint; resume_from_checkpoint=False "
                "starts from the beginning", folder, mark.update,
            )  # fmt: skip
            self._resume_marked(mark)
        else:
            if accelerator.is_local_main_process:
                remove_mark(folder, self._training)
            if asked:
                accelerator.resume("latest" if asked is True else asked)
            elif accelerator.save_iteration:
                log.info(
                    "%s holds checkpoints of earlier runs, which stay; this one's are numbered from %d on. "
                    "resume_from_checkpoint=True resumes from the newest", folder, accelerator.save_iteration,
                )  # fmt: skip
        self.state.global_step = accelerator.num_updates
        self.control.should_training_stop = self.state.global_step >= self.state.max_steps
        self.begin_run()
        if not self.state.global_step:
            # The first step tells readers of the log that this is not a continuation of what may stand in it.
            accelerator.log({"epoch": 0.0}, step=0)

    def _resume_marked(self, mark: Mark) -> None:
        try:
            self.accelerator.resume("latest", run=mark.run)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}\nThe same command was preempted and has to resume; resume_from_checkpoint=False starts from the beginning"
            ) from error

    def _leave_mark(self, checkpoint: str | Path, asked: str | Path | bool | None) -> None:
        """The run was asked to end: note where the same command goes on."""
        if asked is False:
            log.warning("the next start is from the beginning, as resume_from_checkpoint=False says; True resumes")
        elif self.accelerator.is_local_main_process:
            leave_mark(self.args.output_dir or ".", checkpoint, self._training, asked, self.state.global_step)

    def _train(self) -> TrainOutput:
        """The loop over epochs; see the class."""
        args, state = self.args, self.state
        self._began = (time.monotonic(), state.global_step)
        self.num_samples_seen, self._last_saved = 0, -1
        self._grad_norm: torch.Tensor | None = None
        self._last_logged = state.global_step
        self._meter = self.accelerator.throughput
        self.model.train()
        self.tell("on_train_begin")
        if args.eval_on_start and not state.global_step:
            self.control.should_evaluate = True
        self._obey()  # also what a run that was asked to end in an evaluation still owes
        num_epochs = sys.maxsize if args.max_steps > 0 else state.num_train_epochs
        if not self.control.should_training_stop:
            for epoch in self.accelerator.epochs(num_epochs):
                self.control.should_epoch_stop = False
                self.tell("on_epoch_begin")
                self._epoch(epoch)
                if self.train_dataloader.is_stopped:  # by the guard against non-finite losses, or from outside
                    break
                self.tell("on_epoch_end")
                self._agree()
                self._obey()
                if self.control.should_training_stop:
                    break
        return self._finish()

    def _epoch(self, epoch: int) -> None:
        """One pass over the data, or what is left of it."""
        loader, accelerator, state = self.train_dataloader, self.accelerator, self.state
        first = loader.num_consumed // loader.total_batch_size if loader.total_batch_size else 0
        index, is_resumed = first, loader.num_consumed > 0
        for index, batch in enumerate(loader, first + 1):
            if accelerator.sync_gradients:
                self.tell("on_step_begin")
            self._micro_batch(batch)
            state.epoch = epoch + (index / self._num_batches if self._num_batches else index / state.max_steps)
            self.num_samples_seen += sum(loader.valid_counts or ())
            if accelerator.num_updates == state.global_step:
                self.tell("on_substep_end")
            else:
                state.global_step = accelerator.num_updates
                self.tell("on_step_end")
                if accelerator.preempted:  # with Preemption(exits=False); else the process has ended
                    self.control.should_save = self.control.should_training_stop = True
                self._agree()
                self._obey()
            if self.control.should_epoch_stop or self.control.should_training_stop:
                break
        if index == first and not is_resumed and not loader.is_stopped:
            raise DataError("an epoch of the training data had no batch; give data, or fewer max_steps")

    def _micro_batch(self, batch: Any) -> None:
        """Forward and backward; and the update, where a window ends."""
        accelerator, loader = self.accelerator, self.train_dataloader
        batch, num_items = take_count(batch)
        num_rows = loader.num_rows or 1
        if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), torch.Tensor):
            self._meter.add(tokens=batch["input_ids"].numel())
        for piece in accelerator.microbatches(batch):
            with accelerator.accumulate(self.model):
                is_whole = piece is batch
                rows = num_rows if is_whole else find_batch_size(piece) or num_rows
                weight = self._loss_of.weight(piece, num_items, is_whole)
                loss = self.training_step(self.model, piece, weight)
                num_valid = num_rows if loader.num_valid is None else loader.num_valid
                weighed = num_valid * rows / num_rows if weight is None or not num_valid else weight
                self.losses.add(loss, float(weighed), rows)
                if accelerator.sync_gradients:
                    self._update()
        self.losses.end_batch(num_rows)
        if accelerator.sync_gradients:
            self.losses.end_window()

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: int | None = None) -> torch.Tensor:
        """Forward and backward of one micro-batch, or of a piece of it; returns its loss.

        Args:
            model: prepared.
            inputs: on the device.
            num_items_in_batch: how many of its labels count; None: the loss is a mean over samples.
        """
        inputs = self._prepare_inputs(inputs)
        more: dict[str, Any] = {"num_items_in_batch": num_items_in_batch} if self._takes_count else {}
        with self.accelerator.autocast():
            loss: torch.Tensor = self.compute_loss(model, inputs, **more)
        self.accelerator.backward(loss, weight=num_items_in_batch)
        return loss.detach()

    def _update(self) -> None:
        limit = self.args.max_grad_norm
        if limit:
            self._grad_norm = self.accelerator.clip_grad_norm_(self.model.parameters(), limit)
        self.tell("on_pre_optimizer_step")
        self._learning_rate = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.tell("on_optimizer_step")
        if not isinstance(self.lr_scheduler.scheduler, ReduceLROnPlateau):
            self.lr_scheduler.step()
        self.optimizer.zero_grad()

    # ---------------------------------------------------------------- after an update

    def _agree(self) -> None:
        """Where callbacks of others decide, what one rank asks for is done by all."""
        if self.accelerator.num_processes > 1 and self.callbacks.has_foreign:
            flags = torch.tensor([float(flag) for flag in self.control.flags()], device=self.accelerator.device)
            self.control.set_flags([flag > 0 for flag in self.accelerator.reduce(flags, "max").tolist()])

    def _obey(self) -> None:
        """Log, evaluate and save as the control says."""
        control, state = self.control, self.state
        if control.should_log and state.global_step > self._last_logged:
            self._log_training()
        control = self.control
        control.should_log = False
        metrics: dict[str, Any] | None = None
        if control.should_evaluate:
            # Given only where it is there: an override may not know it.
            ignored = self._ignored_in_evaluations
            metrics = self.evaluate() if ignored is None else self.evaluate(ignore_keys=ignored)
            control = self.control
            control.should_evaluate = False
            is_best = note_best(state, self.args, metrics)
            if isinstance(self.lr_scheduler.scheduler, ReduceLROnPlateau):
                self.lr_scheduler.step(metrics[self.args.wanted_metric or "eval_loss"])
            if self.args.save_strategy == "best":
                control.should_save = is_best
        is_due, control.should_save = control.should_save and state.global_step != self._last_saved, False
        if is_due:
            self._checkpoint(metrics)

    def _log_training(self) -> None:
        loss = self.losses.take()
        logs: dict[str, Any] = {} if loss is None else {"loss": loss}
        if self._grad_norm is not None:
            logs["grad_norm"] = float(self._grad_norm)
        logs["learning_rate"] = self._learning_rate
        self._last_logged = self.state.global_step
        self.log(logs)

    def _checkpoint(self, metrics: dict[str, Any] | None) -> None:
        """Take a checkpoint, and write it behind the loop."""
        state, args = self.state, self.args
        value = None if metrics is None else metrics.get(args.wanted_metric or "")
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = str(checkpoint_path(args.output_dir or ".", self.accelerator.save_iteration))
        metric = None if value is None or math.isnan(value) else float(value)
        self._newest = self.accelerator.save_state(blocking=False, metric=metric)
        self._last_saved = state.global_step
        self.tell("on_save")

    # ---------------------------------------------------------------- the end

    def _finish(self) -> TrainOutput:
        accelerator, state, args = self.accelerator, self.state, self.args
        seconds = time.monotonic() - self._began[0]
        accelerator.wait_for_save()
        if args.load_best_model_at_end and state.best_model_checkpoint and state.best_global_step != state.global_step:
            log.info("the weights of update %s are loaded: %s", state.best_global_step, state.best_model_checkpoint)
            load_weights(state.best_model_checkpoint, self.model)
        num_samples = self.num_samples_seen
        metrics = speed("train", seconds, num_samples, state.global_step - self._began[1])
        metrics["train_loss"] = self.losses.mean()
        metrics["epoch"] = state.epoch
        if self._monitor is not None:
            metrics["train_memory_peak"] = self._monitor.peak
            if not args.skip_memory_metrics:
                metrics |= {f"train_memory_peak_{phase}": peak for phase, peak in self._monitor.peaks.items()}
        self.log(dict(metrics))
        accelerator.end_trackers()
        self.tell("on_train_end")
        return TrainOutput(state.global_step, metrics["train_loss"], metrics)

    def _release(self) -> None:
        """Give the model its own class and forward back, and let go of gradients and of the optimizer made here."""
        self.is_in_train, self._monitor = False, None
        self._wait_for_writer()
        for callback in self.callbacks.all:
            if isinstance(callback, ProgressCallback):
                callback.close()
        self.model.zero_grad(set_to_none=True)
        self._undo(self.accelerator)
        self.accelerator.stop_watching()  # an evaluation that follows has nothing to save
        self.optimizer, self.lr_scheduler = self._given_optimizer, self._given_scheduler
        self.train_dataloader = None
        self._eval_loaders = {}

    def _wait_for_writer(self) -> None:
        """Where training broke off, let the last checkpoint become whole; alone, because other ranks may be elsewhere."""
        if self.accelerator.num_processes == 1:
            try:
                self.accelerator.wait_for_save()
            except CheckpointError as error:
                log.warning("the last checkpoint was not written: %s", error)
