"""The Trainer: a builder, an evaluator, a log and a loop behind one face, on top of the Accelerator and nothing else."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from headway.accelerator import Accelerator
from headway.config.values import known_keywords
from headway.data.loader import PreparedLoader
from headway.errors import CheckpointError, ConfigError, DataError, Preempted
from headway.log import get_logger
from headway.memory.monitor import MemoryMonitor
from headway.runtime.collectives.tree import Tree
from headway.runtime.seed import set_seed
from headway.runtime.transfers import move
from headway.trainer import builder, results
from headway.trainer.arguments import TrainingArguments
from headway.trainer.callbacks import (
    DefaultFlowCallback,
    Events,
    PrinterCallback,
    ProgressCallback,
    TrainerControl,
    TrainerState,
)
from headway.trainer.checkpoints import Continuation, TrainerRecord, check_folder, settings_of
from headway.trainer.data import Batch, Collate, Collator, Data, EvalData, check_dataset, length_of, train_sampler
from headway.trainer.evaluation import Evaluator
from headway.trainer.loop import PreparedTraining, Training, count_updates
from headway.trainer.loss import LossBook, LossFunction
from headway.trainer.methods import EvaluationMethods, check_overrides, overridden
from headway.trainer.optimizer import create_optimizer, create_schedule, decaying_names, stretch_schedule, without_state

log = get_logger(__name__)


@known_keywords
class Trainer(EvaluationMethods):
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

    Attributes:
        args: the arguments.
        model: the user's own object, also while it is prepared.
        accelerator: of the training in progress, or of the last one.
        state: how far the training is.
        control: what the loop does next.
        optimizer, lr_scheduler: as they were given or made; None before the first training makes them. After it, groups, rates
            and settings of what was made can be read; its state is freed.
        train_dataloader: of the training in progress, prepared; None at other times.
        is_in_train: is a training in progress?
        label_names: the batch's keys that are labels.

    Raises:
        ConfigError: arguments that contradict each other.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Collate | None = None,
        train_dataset: Data | None = None,
        eval_dataset: EvalData | None = None,
        processing_class: Any = None,
        model_init: Callable[[], torch.nn.Module] | None = None,
        compute_loss_func: LossFunction | None = None,
        compute_metrics: object = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Tree, Tree], Tree] | None = None,
        *,
        loss_function: LossFunction | None = None,
        tokenizer: Any = None,
    ) -> None:
        check_overrides(type(self))
        self.args = args = builder.checked_arguments(model, args, optimizers[0])
        builder.check_given_once(
            compute_loss_func=(compute_loss_func, "loss_function", loss_function),
            processing_class=(processing_class, "tokenizer", tokenizer),
            optimizers=(optimizers[0], "optimizer_cls_and_kwargs", optimizer_cls_and_kwargs),
        )
        if args.log_level not in (None, "passive"):
            get_logger("headway", "debug" if args.log_level == "detail" else args.log_level)
        self.accelerator = self.create_accelerator()
        self.accelerator.stop_watching()  # until the training begins: before it there is nothing to save
        set_seed(args.seed)
        self._model_init = model_init
        self._function = compute_loss_func if loss_function is None else loss_function
        self._set_model(builder.chosen_model(model, model_init))
        self.processing_class = tokenizer if processing_class is None else processing_class
        own = Collator(self.processing_class, getattr(getattr(self.model, "config", None), "pad_token_id", None))
        self.data_collator: Collate = own if data_collator is None else data_collator
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self._given_optimizers = optimizers
        self._optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        self.train_dataloader: PreparedLoader | None = None
        self.is_in_train = self._has_trained = False
        size = args.per_device_train_batch_size
        self._train_batch_size = size if isinstance(size, int) else 1
        self._takes_count = "num_items_in_batch" in inspect.signature(self.compute_loss).parameters
        shown = PrinterCallback() if args.disable_tqdm else ProgressCallback()
        self._events = Events(args, [DefaultFlowCallback()], [*(callbacks or ()), shown], self, self._new_state())
        self._log_to(results.Log(args, self.accelerator, self._events))
        self.tell("on_init_end")

    def _set_model(self, model: torch.nn.Module) -> None:
        self.model = model
        self._signature = builder.read_signature(model, self.args, self._function)
        self.label_names = self._signature.label_names

    def _new_state(self) -> TrainerState:
        return TrainerState(
            is_world_process_zero=self.accelerator.is_main_process,
            is_local_process_zero=self.accelerator.is_local_main_process,
        )

    # ---------------------------------------------------------------- train

    def train(
        self,
        resume_from_checkpoint: str | Path | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> results.TrainOutput:
        """Train to the end; every rank calls it. A second call is a new training, from the model as it is.

        Args:
            resume_from_checkpoint: True: go on from the newest checkpoint in `output_dir` that verifies, or begin where there is
                none yet. A folder: from that one. None: as the arguments say; where those say nothing either, go on where the same
                command was preempted (exit code 75), else begin. False: begin, whatever there is.
            trial: of a hyperparameter search: not served.
            ignore_keys_for_eval: as `ignore_keys` of the evaluations on the way.

        Returns:
            (global_step, training_loss, metrics); see `TrainOutput`.

        Raises:
            DataError: there is no data.
            CheckpointError: the folder is damaged, or does not fit.
            MemoryExhausted: not even one row fits, with `auto_find_batch_size`.
        """
        args, folder = self.args, self.args.output_dir or "."
        if trial is not None:
            raise ConfigError(
                "train(trial=...): a search is not built in; give Optuna's study.optimize a function that makes arguments and "
                "a Trainer(model_init=...) from a trial, and returns a metric"
            )
        asked = args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        check_folder(self.accelerator, asked, folder)
        continuation = Continuation(folder, asked, "data" if args.ignore_data_skip else ())
        self._start_training()
        try:
            with MemoryMonitor(by_phase=not args.skip_memory_metrics) as monitor:
                run_log = results.TrainingLog(args, self.accelerator, self._events, monitor)
                losses = LossBook(self.accelerator)
                self.is_in_train = True
                self._log_to(run_log)
                self.accelerator.start_watching()
                prepared = self._prepare_training(losses)
                self.check_evaluation()
                self._resume_training(continuation, prepared)
                training = Training(args, prepared, self._events, run_log, losses, self, ignore_keys_for_eval)
                output = training.run()
                if self.accelerator.preempted:  # with Preemption(exits=False)
                    continuation.preempted(self.accelerator, training.newest, self.state.global_step)
                else:
                    continuation.end_well(self.accelerator)
                return output
        except Preempted as told:
            continuation.preempted(self.accelerator, told.checkpoint, self.state.global_step)
            raise
        finally:
            self._release_training()

    def _start_training(self) -> None:
        """An Accelerator of its own for each training, streams from the seed, the model, and its batch size."""
        args = self.args
        if self._has_trained:
            self.accelerator.end_trackers()
            self.accelerator = self.create_accelerator()
        self._has_trained = True
        set_seed(args.seed)
        if self._model_init is not None:
            self._set_model(builder.chosen_model(None, self._model_init))
        if args.per_device_train_batch_size == "largest":
            self._train_batch_size = self.find_largest_batch_size()
            set_seed(args.seed)

    def _prepare_training(self, losses: LossBook) -> PreparedTraining:
        """Prepare everything, always in the same order: a resumed run finds it by that."""
        accelerator, args, model = self.accelerator, self.args, self.model
        self._events.start(self._new_state())
        self.state.train_batch_size = self._train_batch_size
        settings = settings_of(args, model)
        builder.checkpoint_activations(args, accelerator, model)
        self.train_dataloader = loader = accelerator.prepare_data_loader(self.get_train_dataloader())
        count_updates(self.state, args, length_of(loader), args.gradient_accumulation_steps)
        move(model, accelerator.device)
        self.optimizer, self.lr_scheduler = self._given_optimizers
        self.create_optimizer_and_scheduler(self.state.max_steps)
        _, self.optimizer, self.lr_scheduler = accelerator.prepare(
            model, self.optimizer, self.lr_scheduler, strict=True
        )
        if args.eval_strategy != "no" or args.eval_on_start:
            self._own_eval_loaders()
        accelerator.register_for_checkpointing(TrainerRecord(self._events, losses, settings))
        set_seed(args.seed, device_specific=True)  # dropout differs from rank to rank
        return PreparedTraining(accelerator, model, self.optimizer, self.lr_scheduler, loader)

    def _resume_training(self, continuation: Continuation, prepared: PreparedTraining) -> None:
        continuation.resume(self.accelerator)
        # On another number of processes updates consist of other batches, to keep the global batch.
        count_updates(self.state, self.args, prepared.num_batches, self.accelerator.gradient_accumulation_steps)
        stretch_schedule(prepared.scheduler, self.args, self.state.max_steps)
        self.state.global_step = self.accelerator.num_updates
        self.control.should_training_stop = self.state.global_step >= self.state.max_steps
        self._log.begin()
        if not self.state.global_step:
            # The first step tells readers of the log that this is not a continuation of what may stand in it.
            self.accelerator.log({"epoch": 0.0}, step=0)

    def _release_training(self) -> None:
        """Give the model its own class and forward back, and let go of gradients and of the optimizer made here."""
        accelerator = self.accelerator
        self.is_in_train = False
        if accelerator.num_processes == 1:  # alone, because other ranks may be elsewhere
            try:
                accelerator.wait_for_save()
            except CheckpointError as error:
                log.warning("the last checkpoint was not written: %s", error)
        for callback in self.callbacks.all:
            if isinstance(callback, ProgressCallback):
                callback.close()
        self.model.zero_grad(set_to_none=True)
        self._drop_optimizer_state()
        builder.release_model(self.args, accelerator, self.model)
        accelerator.stop_watching()  # an evaluation that follows has nothing to save
        self.train_dataloader = None
        self._log_to(results.Log(self.args, accelerator, self._events))

    def _drop_optimizer_state(self) -> None:
        """Those given are the user's again; of those made here groups and rates can be read, and the state is freed."""
        freed = without_state(self.optimizer, self.lr_scheduler)
        both = [made if given is None else given for given, made in zip(self._given_optimizers, freed)]
        self.optimizer, self.lr_scheduler = both

    def _log_to(self, run_log: results.Log) -> None:
        """Log there, and evaluate with the Accelerator that is in use now: in a training, or outside one."""
        self._log = run_log
        self._evaluator = Evaluator(self.accelerator, self._events, run_log, self, self.is_in_train)

    # ---------------------------------------------------------------- the step, for subclasses

    def training_step(
        self, model: torch.nn.Module, inputs: Batch, num_items_in_batch: int | None = None
    ) -> torch.Tensor:
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

    # ---------------------------------------------------------------- what a training is built of, for subclasses

    def create_accelerator(self) -> Accelerator:
        """The Accelerator of one training, by the arguments."""
        return builder.create_accelerator(self.args)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The training data, not yet prepared.

        Raises:
            DataError: there is none.
        """
        if self.train_dataset is None:
            raise DataError("the Trainer was given no train_dataset, so there is nothing to train on")
        check_dataset(self.train_dataset)
        sampler = self._get_train_sampler(self.train_dataset)
        return self._loader(self.train_dataset, self._train_batch_size, sampler, self.args.dataloader_drop_last)

    def _get_train_sampler(self, train_dataset: Data | None = None) -> Sampler[int] | None:
        """The order of the training data; None for a stream. May be overridden."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return train_sampler(check_dataset(dataset), self.args, self.get_total_train_batch_size())

    def get_total_train_batch_size(self, args: TrainingArguments | None = None) -> int:
        """Samples of one update, over all processes."""
        num_shards = self.accelerator.strategy.data_shard.count
        return self._train_batch_size * self.args.gradient_accumulation_steps * num_shards

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Set `optimizer` and `lr_scheduler` where they are None; an override may do it in its own way."""
        if self.optimizer is None:
            # An override may set the attribute itself.
            self.optimizer = self.create_optimizer() or self.optimizer
        if self.lr_scheduler is None:
            self.lr_scheduler = self.create_scheduler(num_training_steps, self.optimizer) or self.lr_scheduler

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer by the arguments; what was given to the Trainer goes first.

        Args:
            model: None: the Trainer's.
        """
        chosen = self.model if model is None else model
        decaying = self.get_decay_parameter_names(chosen)
        return create_optimizer(chosen, self.args, self._optimizer_cls_and_kwargs, decaying)

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        """The names of the parameters that decay: all but biases and parameters of norms."""
        return decaying_names(model)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """The schedule by the arguments, counted in updates.

        Args:
            num_training_steps: updates.
            optimizer: None: the Trainer's.
        """
        return create_schedule(self.optimizer if optimizer is None else optimizer, self.args, num_training_steps)

    def find_largest_batch_size(self) -> int:
        """The most rows of a micro-batch that fit, by updates on the longest rows of the training data.

        The weights are put back afterwards.

        Raises:
            BatchSizeError: not even one row fits.
        """
        search = builder.LargestBatch(
            self.args, self.model, self._signature, self.create_accelerator, self.create_optimizer, self._loader
        )
        return search.find(self.train_dataset, self.accelerator.strategy.data_shard.count)

    # ---------------------------------------------------------------- events and the log

    @property
    def callbacks(self) -> Events:
        """The callbacks, and what they are told."""
        return self._events

    callback_handler = callbacks

    @property
    def state(self) -> TrainerState:
        """How far the training is."""
        return self._events.state

    @state.setter
    def state(self, state: TrainerState) -> None:
        self._events.state = state

    @property
    def control(self) -> TrainerControl:
        """What the loop does next."""
        return self._events.control

    @control.setter
    def control(self, control: TrainerControl) -> None:
        self._events.control = control

    def tell(self, event: str, **more: object) -> None:
        """Tell the callbacks of an event; they may change the control."""
        self._events.tell(event, **more)

    def add_callback(self, callback: Any) -> None:
        """Add a callback: an object, or a class to make one of."""
        self.callbacks.add(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Take out a callback, by object or class, and return it; None where there is none."""
        return self.callbacks.pop(callback)

    def remove_callback(self, callback: Any) -> None:
        """Take out a callback, by object or class."""
        self.callbacks.pop(callback)

    def log(self, logs: results.Metrics, start_time: float | None = None) -> None:
        """Log values: to `state.log_history`, callbacks, the run's log and its trackers.

        Args:
            logs: by name; `epoch` is added.
            start_time: accepted for the name's sake.
        """
        self._log.write(logs)

    # ---------------------------------------------------------------- files

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Write the weights as safetensors, the model's config and the processing class; every rank calls it.

        Args:
            output_dir: None: that of the arguments.
            _internal_call: True: do not upload, whatever the arguments say.
        """
        if not overridden(type(self), ["_save"]):
            self._save(None if output_dir is None else str(output_dir))
        else:
            if self.accelerator.is_main_process:
                self._save(str(self._output_folder(output_dir)))
            self.accelerator.wait_for_everyone()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub("Model save")
