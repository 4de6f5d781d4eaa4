"""The `Trainer` class, which combines arguments, evaluator, log and training loop.

Preparation, updates and checkpoints go through the Accelerator.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from headway.accelerator import Accelerator
from headway.core.config.values import report_unknown_keywords
from headway.core.data.loader import PreparedLoader
from headway.core.memory.monitor import MemoryMonitor
from headway.core.runtime.collectives.tree import Tree
from headway.core.runtime.moving import move_module
from headway.core.runtime.seed import set_seed
from headway.errors import CheckpointError, ConfigError, DataError, Preempted
from headway.log import get_logger
from headway.trainer import builder, results
from headway.trainer.arguments import TrainingArguments
from headway.trainer.callbacks import CallbackHandler, TrainerControl, TrainerState
from headway.trainer.checkpoints import TrainerRecord, list_settings
from headway.trainer.collation import Collate, Collator
from headway.trainer.data import Batch, Data, EvalData, check_dataset, get_length, make_train_sampler
from headway.trainer.display import PrinterCallback, ProgressCallback
from headway.trainer.embedding_noise import EmbeddingNoise
from headway.trainer.evaluation import Evaluator
from headway.trainer.evaluation_methods import EvaluationMethods
from headway.trainer.generation import set_generation_config
from headway.trainer.largest_batch import LargestBatch
from headway.trainer.logs import Log, TrainingLog
from headway.trainer.loop import PreparedTraining, Training, count_updates
from headway.trainer.loss import LossFunction
from headway.trainer.loss_book import LossBook
from headway.trainer.optimizer import create_optimizer, list_decaying_names
from headway.trainer.optimizer_names import forget_options
from headway.trainer.overrides import check_overrides, list_overridden
from headway.trainer.packing import Packer
from headway.trainer.resuming import ResumeDecision, check_folder
from headway.trainer.rules import DefaultFlowCallback
from headway.trainer.schedule_free import set_optimizer_mode
from headway.trainer.schedules import create_schedule, stretch_schedule
from headway.trainer.signature import read_signature
from headway.trainer.source_losses import SourceBook, find_mixture
from headway.trainer.stateless_optimizer import make_stateless
from headway.trainer.tokens import TokenCounter

log = get_logger(__name__)


@report_unknown_keywords
class Trainer(EvaluationMethods):
    """Training loop for a model, configured by `TrainingArguments`. It also evaluates and predicts.

    Create it on every rank, in the main thread. The constructor creates an Accelerator, which starts the process group if
    there are several processes, and calls `set_seed(args.seed)`. The model is moved to the device when a method needs it.

    Example::

        args = TrainingArguments("runs/first", num_train_epochs=1, per_device_train_batch_size=8)
        trainer = Trainer(model, args, train_dataset=train_data, eval_dataset=eval_data)
        trainer.train()
        print(trainer.evaluate())
        trainer.save_model("model")

    The whole loop, with the point at which each callback event fires::

        train():
            prepare model, optimizer, schedule, loaders                    # on_init_end fired in the constructor
            check_evaluation(); resume
            on_train_begin
            for epoch in accelerator.epochs(num_epochs):
                on_epoch_begin
                for batch in train_dataloader:
                    on_step_begin                                          # an accumulation window begins
                    for piece in accelerator.microbatches(batch):          # one piece, or more if memory ran out
                        with accelerator.accumulate(model):
                            loss = compute_loss(model, piece)
                            accelerator.backward(loss, weight=number of labels that count)
                            if accelerator.sync_gradients:                 # the window ends
                                clip_grad_norm_
                                on_pre_optimizer_step
                                optimizer.step()
                                on_optimizer_step
                                scheduler.step(); optimizer.zero_grad()
                    on_substep_end, or after an update: on_step_end, and the actions that it requests:
                        log()              on_log
                        evaluate()         on_prediction_step for each batch, on_log, on_evaluate
                        save               on_save
                on_epoch_end, and the actions that it requests
            load the best weights; log()   on_log
            on_train_end

    Args:
        model: A transformers model, or any module; see `loss_function`. None (the default): `model_init` creates it.
        args: Arguments of the training. None (the default): `TrainingArguments()`.
        data_collator: Function that makes a batch from a list of rows. None (the default): rows are padded and stacked.
        train_dataset: Training data: a dataset of the datasets library or of torch, or a list of rows. None (the
            default): the Trainer does not train.
        eval_dataset: Evaluation data, in any form that training data may have, or a dict of several datasets by name.
            None (the default): pass data to `evaluate`.
        processing_class: Tokenizer or similar object, which pads rows and is saved with the model. None (the default):
            no such object.
        model_init: Function that creates a new model for each training run, to be used instead of `model`.
            None (the default): `model` is trained.
        compute_loss_func: Alternative name of `loss_function`. None (the default): not given.
        compute_metrics: Function of an `EvalPrediction` that returns a dict of numbers by name. Alternatively an object
            with `update(predictions, labels)` and `compute()`, which does not keep all predictions in memory. None (the
            default): only the loss is computed.
        callbacks: Callbacks as objects or classes, in addition to Headway's own. None (the default): no others.
        optimizers: Pair of (optimizer, schedule). If one of them is None, it is created from the arguments. Default:
            (None, None).
        optimizer_cls_and_kwargs: Class of the optimizer and its keyword arguments, which replace the optimizer settings
            in `args` except `weight_decay`. None (the default): as in `args`.
        preprocess_logits_for_metrics: Function of (predictions, labels), called for each batch on the device, that
            returns the part of the predictions to keep. None (the default): all are kept.
        loss_function: Function `f(outputs, labels)` that returns a mean over the batch. None (the default): the model's
            forward returns the loss.
        tokenizer: Older name of `processing_class`. None (the default): not given.

    Attributes:
        args: Arguments of the training.
        model: The user's model object, also while it is prepared.
        accelerator: Accelerator of the current training, or of the last one.
        state: Progress of the training.
        control: Flags that determine the next actions of the loop.
        optimizer: Optimizer, given or created. None before the first training run creates it. After a training run,
            groups, learning rates and settings of a created optimizer can be read, but its state has been freed.
        lr_scheduler: Schedule, given or created. None before the first training run creates it.
        train_dataloader: Prepared loader of the current training. None at other times.
        is_in_train: Whether a training run is in progress.
        label_names: Keys of the batch that are labels.

    Raises:
        ConfigError: If arguments contradict each other, `model` or `args` has the wrong type, or a subclass overrides a
            method that Headway never calls.
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
        self.args = args = builder.check_arguments(model, args, optimizers[0])
        builder.check_not_both("compute_loss_func", compute_loss_func, "loss_function", loss_function)
        builder.check_not_both("processing_class", processing_class, "tokenizer", tokenizer)
        builder.check_not_both("optimizers", optimizers[0], "optimizer_cls_and_kwargs", optimizer_cls_and_kwargs)
        if args.log_level not in (None, "passive"):
            get_logger("headway", "debug" if args.log_level == "detail" else args.log_level)
        if args.tf32 is not None:
            builder.set_tf32(args.tf32)
        self.accelerator = self.create_accelerator()
        self.accelerator.stop_watching()  # Before the training begins there is nothing to save after a preemption signal.
        set_seed(args.seed)
        self._model_init = model_init
        self._loss_function = compute_loss_func if loss_function is None else loss_function
        self._set_model(builder.get_or_create_model(model, model_init))
        self.processing_class = tokenizer if processing_class is None else processing_class
        default_collator = Collator(
            self.processing_class, getattr(getattr(self.model, "config", None), "pad_token_id", None)
        )
        self._packer = Packer(args, data_collator, self.processing_class)
        self.data_collator: Collate = default_collator if data_collator is None else data_collator
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self._user_optimizers = optimizers
        self._optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        self.train_dataloader: PreparedLoader | None = None
        self.is_in_train = False
        self._generation_options: dict[str, Any] = {}  # arguments of `model.generate` for the evaluation in progress
        self._embedding_noise: EmbeddingNoise | None = None  # hook of `neftune_noise_alpha`
        self._has_trained = False  # whether `train` was called before, so that the next run needs a new Accelerator
        size = args.per_device_train_batch_size  # "largest" is replaced by a number when `train` has searched for it
        self._train_batch_size = size if isinstance(size, int) else 1
        # An override of `compute_loss` may have an older signature.
        self._accepts_num_items = "num_items_in_batch" in inspect.signature(self.compute_loss).parameters
        display = PrinterCallback() if args.disable_tqdm else ProgressCallback()
        self._callback_handler = CallbackHandler(
            args, [DefaultFlowCallback()], [*(callbacks or ()), display], self, self._create_state()
        )
        self._replace_log_and_evaluator(Log(args, self.accelerator, self._callback_handler))
        self.call_event("on_init_end")

    def _set_model(self, model: torch.nn.Module) -> None:
        """Replace the model, and read the arguments of its `forward` and its label names."""
        self.model = model
        builder.set_use_cache(model, self.args.use_cache)
        set_generation_config(model, self.args)
        self._signature = read_signature(model, self.args, self._loss_function)
        self.label_names = self._signature.label_names

    def _create_state(self) -> TrainerState:
        """Return the state at the beginning of a training."""
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
        """Train until the last update. Every rank must call it.

        A second call starts a new training run with the model's current weights, or with a new model from `model_init`.
        Checkpoints are written to `output_dir/checkpoints` in the background.

        Args:
            resume_from_checkpoint: True: resume from the newest valid checkpoint in `output_dir`, or start from the
                beginning if there is none. A folder: resume from it. False: start from the beginning. None (the
                default): use the value in the arguments. If that is None too, resume if this command was preempted
                (exit code 75), otherwise start from the beginning.
            trial: Must be None, because hyperparameter search is not supported.
            ignore_keys_for_eval: Names of model outputs that are not predictions, for evaluations during training.
                None (the default): those that the model's config names.

        Returns:
            Tuple of (global_step, training_loss, metrics); see `TrainOutput`.

        Raises:
            ConfigError: If `trial` is given, or the arguments do not fit the model or the data.
            DataError: If there is no training data, or an epoch has no batch.
            MetricError: If `compute_metrics` raises an error in the sanity check of the evaluation.
            CheckpointError: If the checkpoint is damaged or does not fit this run.
            MemoryExhausted: If not even one row fits into memory, with `auto_find_batch_size`.
            BatchSizeError: If not even one row fits into memory, with `per_device_train_batch_size="largest"`.
            Preempted: If the run is preempted, after a checkpoint was saved. The process then exits with code 75.
        """
        args, folder = self.args, self.args.output_dir or "."
        if trial is not None:
            raise ConfigError(
                "train(trial=...): a search is not built in; give Optuna's study.optimize a function that makes arguments and "
                "a Trainer(model_init=...) from a trial, and returns a metric"
            )
        requested = args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        check_folder(self.accelerator, requested, folder)
        resume_decision = ResumeDecision(folder, requested, "data" if args.ignore_data_skip else ())
        self._start_training()
        try:
            with MemoryMonitor(by_phase=not args.skip_memory_metrics) as monitor:
                run_log = TrainingLog(args, self.accelerator, self._callback_handler, monitor)
                losses = LossBook(self.accelerator)
                self.is_in_train = True
                self._replace_log_and_evaluator(run_log)
                self.accelerator.start_watching()
                prepared = self._prepare_training(losses)
                self.check_evaluation()
                self._resume_training(resume_decision, prepared)
                tokens = TokenCounter(
                    self.accelerator, args.include_num_input_tokens_seen, self.model, self.processing_class
                )
                training = Training(
                    args, prepared, self._callback_handler, run_log, losses, tokens, self, ignore_keys_for_eval
                )
                output = training.run()
                if self.accelerator.preempted:  # with Preemption(exits=False)
                    resume_decision.write_marker(self.accelerator, training.newest_checkpoint, self.state.global_step)
                else:
                    resume_decision.remove_marker(self.accelerator)
                return output
        except Preempted as preemption:
            resume_decision.write_marker(self.accelerator, preemption.checkpoint, self.state.global_step)
            raise
        finally:
            self._release_training()

    def _start_training(self) -> None:
        """Create the Accelerator, set the seed, and determine the model and the batch size for a new training run."""
        args = self.args
        if self._has_trained:
            self.accelerator.end_trackers()
            self.accelerator = self.create_accelerator()
        self._has_trained = True
        set_seed(args.seed)
        if self._model_init is not None:
            self._set_model(builder.get_or_create_model(None, self._model_init))
        if args.per_device_train_batch_size == "largest":
            self._train_batch_size = self.find_largest_batch_size()
            set_seed(args.seed)

    def _prepare_training(self, losses: LossBook) -> PreparedTraining:
        """Prepare all objects of a training run in a fixed order, by which a resumed run identifies them.

        Args:
            losses: Recorder of the losses.
        """
        accelerator, args, model = self.accelerator, self.args, self.model
        self._callback_handler.start_run(self._create_state())
        self.state.train_batch_size = self._train_batch_size
        settings = list_settings(args, model)  # of the model before it is prepared
        builder.apply_memory_savings(args, accelerator, model)
        if args.neftune_noise_alpha:
            self._embedding_noise = EmbeddingNoise(model, args.neftune_noise_alpha)
        self.train_dataloader = loader = accelerator.prepare_data_loader(self.get_train_dataloader())
        count_updates(self.state, args, get_length(loader), args.gradient_accumulation_steps)
        # Before the optimizer is created, which may need parameters on the device
        move_module(model, accelerator.device)
        self.optimizer, self.lr_scheduler = self._user_optimizers
        self.create_optimizer_and_scheduler(self.state.max_steps)
        _, self.optimizer, self.lr_scheduler = accelerator.prepare(
            model, self.optimizer, self.lr_scheduler, strict=True
        )
        average = builder.create_average(args, model)
        self._evaluator.average = average
        source_book = self._create_source_book(loader.dataset)
        # The loss adds values to it, and the recorder of the losses logs and saves them.
        losses.source_book = source_book
        self._signature.batch_loss.source_book = source_book
        self._packer.check_loader(loader.dataset)
        self._packer.check_model(accelerator, model, loader.dataset)
        if args.eval_strategy != "no" or args.eval_on_start:
            self._get_own_eval_loaders()
        accelerator.register_for_checkpointing(TrainerRecord(self._callback_handler, losses, settings))
        set_seed(args.seed, device_specific=True)  # dropout must differ between ranks
        noise = self._embedding_noise if args.neftune_noise_alpha else None
        return PreparedTraining(accelerator, model, self.optimizer, self.lr_scheduler, loader, average, noise)

    def _create_source_book(self, dataset: Data) -> SourceBook | None:
        """Return the recorder of losses by source, or None.

        Losses are recorded if the training data is a mixture and the model computes its own loss.
        """
        mixture, batch_loss = find_mixture(dataset), self._signature.batch_loss
        if mixture is None or not self._can_divide_loss(dataset):
            return None
        return SourceBook(self.accelerator, mixture.names, batch_loss.count_labels.is_shifted, batch_loss.smoothing)

    def _resume_training(self, resume_decision: ResumeDecision, prepared: PreparedTraining) -> None:
        """Load the checkpoint that was chosen, and adapt the number of updates and the schedule to this run.

        Args:
            resume_decision: Checkpoint from which to resume, if any.
            prepared: Prepared model, optimizer, schedule and loader.
        """
        resume_decision.resume(self.accelerator)
        # With a different number of processes, an update has a different number of batches, to keep the global batch.
        count_updates(self.state, self.args, prepared.num_batches, self.accelerator.gradient_accumulation_steps)
        stretch_schedule(prepared.scheduler, self.args, self.state.max_steps)
        self.state.global_step = self.accelerator.num_updates
        self.control.should_training_stop = self.state.global_step >= self.state.max_steps
        self._log.start_log()
        if not self.state.global_step:
            # A log entry at step 0 shows that the run starts here and does not continue older entries in the file.
            self.accelerator.log({"epoch": 0.0}, step=0)

    def _release_training(self) -> None:
        """Undo the preparation of the model after a training run.

        Gradients, the loader, and the state of an optimizer that the Trainer created are freed.
        """
        accelerator = self.accelerator
        self.is_in_train = False
        if accelerator.num_processes == 1:  # with more processes, other ranks may be at a different point
            try:
                accelerator.wait_for_save()
            except CheckpointError as error:
                log.warning("the last checkpoint was not written: %s", error)
            set_optimizer_mode(self.optimizer, is_training=False)  # after an error, too, the model has final weights
        for callback in self._callback_handler.callbacks:
            if isinstance(callback, ProgressCallback):
                callback.close()
        if self._embedding_noise is not None:
            self._embedding_noise.remove()
        self.model.zero_grad(set_to_none=True)
        self._drop_optimizer_state()
        builder.release_model(self.args, accelerator, self.model)
        accelerator.stop_watching()  # an evaluation after the training has nothing to save
        self.train_dataloader = None
        self._signature.batch_loss.source_book = None
        self._replace_log_and_evaluator(Log(self.args, accelerator, self._callback_handler))

    def _drop_optimizer_state(self) -> None:
        """Restore the user's own optimizer and schedule, or free the state of those that the Trainer created.

        Objects that the Trainer created are replaced by copies whose learning rates and settings can be read.
        """
        optimizer, lr_scheduler = make_stateless(self.optimizer, self.lr_scheduler)
        user_optimizer, user_lr_scheduler = self._user_optimizers
        if user_optimizer is None:
            forget_options(optimizer)
        self.optimizer = optimizer if user_optimizer is None else user_optimizer
        self.lr_scheduler = lr_scheduler if user_lr_scheduler is None else user_lr_scheduler

    def _replace_log_and_evaluator(self, run_log: Log) -> None:
        """Replace the log, and create a new evaluator for the current Accelerator.

        The evaluator reads `is_in_train` once, when it is created. Set that attribute before the call.

        Args:
            run_log: Log of a training run, or of values outside of a training run.
        """
        self._log = run_log
        self._evaluator = Evaluator(self.accelerator, self._callback_handler, run_log, self, self.is_in_train)

    # ---------------------------------------------------------------- the step, for subclasses

    def training_step(
        self, model: torch.nn.Module, inputs: Batch, num_items_in_batch: int | None = None
    ) -> torch.Tensor:
        """Run forward and backward of one micro-batch, and return the detached loss.

        If memory runs out, this method is called again with parts of the micro-batch.

        Args:
            model: Prepared model.
            inputs: Batch on the device.
            num_items_in_batch: Number of labels of the batch that are not ignored. None (the default): the loss is a
                mean over samples.
        """
        inputs = self._prepare_inputs(inputs)
        options: dict[str, Any] = {"num_items_in_batch": num_items_in_batch} if self._accepts_num_items else {}
        with self.accelerator.autocast():
            loss: torch.Tensor = self.compute_loss(model, inputs, **options)
        self.accelerator.backward(loss, weight=num_items_in_batch)
        return loss.detach()

    # ---------------------------------------------------------------- parts of a training run, for subclasses

    def create_accelerator(self) -> Accelerator:
        """Create the Accelerator of one training run from the arguments. A subclass may override it."""
        return builder.create_accelerator(self.args)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the training data. It is not prepared yet. A subclass may override it.

        Raises:
            DataError: If there is no training data, or it is not a dataset.
        """
        dataset = self._get_training_rows()
        sampler = self._get_train_sampler(dataset)
        drops_last = self.args.dataloader_drop_last
        return self._make_loader(dataset, self._train_batch_size, sampler, drops_last, is_training=True)

    def _get_training_rows(self) -> Data:
        """Return the training data, packed if the arguments ask for it.

        Raises:
            DataError: If there is no training data, or it is not a dataset.
        """
        if self.train_dataset is None:
            raise DataError("the Trainer was given no train_dataset, so there is nothing to train on")
        rows: Data = self._pack_dataset(check_dataset(self.train_dataset), is_training=True)
        return rows

    def _get_train_sampler(self, train_dataset: Data | None = None) -> Sampler[int] | None:
        """Return the sampler of the training data, or None for an iterable dataset. A subclass may override it.

        Args:
            train_dataset: Dataset whose rows are sampled. None: the Trainer's own.
        """
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return make_train_sampler(check_dataset(dataset), self.args, self.get_total_train_batch_size())

    def get_total_train_batch_size(self, args: TrainingArguments | None = None) -> int:
        """Return the number of samples per update over all processes.

        Args:
            args: Ignored. Accepted for compatibility with transformers.
        """
        num_shards = 1 if self.accelerator.split_batches else self.accelerator.strategy.data_shard.count
        return self._train_batch_size * self.args.gradient_accumulation_steps * num_shards

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Create `optimizer` and `lr_scheduler` if they are None. A subclass may override it.

        Args:
            num_training_steps: Number of updates of the training run.
        """
        if self.optimizer is None:
            # An override may set the attribute itself and return None.
            self.optimizer = self.create_optimizer() or self.optimizer
        if self.lr_scheduler is None:
            self.lr_scheduler = self.create_scheduler(num_training_steps, self.optimizer) or self.lr_scheduler

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer. A class that was passed to the Trainer takes precedence over the name in the arguments.

        Args:
            model: Model whose parameters are updated. None (the default): the Trainer's model.

        Raises:
            ConfigError: If there are no trainable parameters, or the optimizer does not accept `optim_args`.
        """
        trained = self.model if model is None else model
        decaying_names = self.get_decay_parameter_names(trained)
        return create_optimizer(trained, self.args, self._optimizer_cls_and_kwargs, decaying_names)

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        """Return the names of the parameters that get weight decay: all except biases and the parameters of norms.

        A subclass may override it.
        """
        return list_decaying_names(model)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Create the learning-rate schedule whose name is in the arguments. It must be stepped once per update.

        "reduce_lr_on_plateau" must be stepped once per evaluation instead, with the metric.

        Args:
            num_training_steps: Number of updates of the training run.
            optimizer: Optimizer whose learning rates the schedule sets. None (the default): the Trainer's optimizer.

        Raises:
            ConfigError: If `lr_scheduler_kwargs` does not fit the schedule.
        """
        return create_schedule(self.optimizer if optimizer is None else optimizer, self.args, num_training_steps)

    def find_largest_batch_size(self) -> int:
        """Return the largest number of rows per micro-batch that fits into memory, up to 5 % too low.

        The search runs updates on the longest rows of the training data. The weights are restored afterward. Every rank
        must call it.

        Raises:
            BatchSizeError: If not even one row fits into memory.
            ConfigError: If the training data is an iterable dataset.
            DataError: If there is no training data, or it is not a dataset.
        """
        dataset = self._get_training_rows()
        loader = partial(self._make_loader, packed_collator=self._packer.choose_collator(dataset, self.model))
        search = LargestBatch(
            self.args, self.model, self._signature, self.create_accelerator, self._create_trial_optimizer, loader
        )
        return search.find_size(dataset, self.accelerator.strategy.data_shard.count)

    def _create_trial_optimizer(self) -> torch.optim.Optimizer:
        """Create a new optimizer for a trial of the search for the largest batch. `optimizer` does not change."""
        own_optimizer, self.optimizer = self.optimizer, None
        try:
            # An override may set the attribute itself and return None.
            trial_optimizer: torch.optim.Optimizer = self.create_optimizer() or self.optimizer
        finally:
            self.optimizer = own_optimizer
        return trial_optimizer

    # ---------------------------------------------------------------- events and the log

    @property
    def callbacks(self) -> CallbackHandler:
        """Handler that calls the callbacks. `trainer.callbacks.callbacks` lists them."""
        return self._callback_handler

    callback_handler = callbacks

    @property
    def state(self) -> TrainerState:
        """Progress of the training."""
        return self._callback_handler.state

    @state.setter
    def state(self, state: TrainerState) -> None:
        self._callback_handler.state = state

    @property
    def control(self) -> TrainerControl:
        """Flags that determine the next actions of the training loop."""
        return self._callback_handler.control

    @control.setter
    def control(self, control: TrainerControl) -> None:
        self._callback_handler.control = control

    def call_event(self, event: str, **event_arguments: object) -> None:
        """Call the method for an event on all callbacks. A callback may change or replace `control`.

        Args:
            event: Name of the event, such as "on_step_end".
            event_arguments: Keyword arguments of this event, in addition to those that every event receives.
        """
        self._callback_handler.call_event(event, **event_arguments)

    def add_callback(self, callback: Any) -> None:
        """Add a callback, which is called after the existing ones.

        Args:
            callback: Callback object, or a class to instantiate without arguments.

        Raises:
            ConfigError: If the callback implements no event.
        """
        self._callback_handler.add(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback and return it. Return None if there is no such callback.

        Args:
            callback: Callback object, or a class, whose first instance is removed.
        """
        return self._callback_handler.pop(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback.

        Args:
            callback: Callback object, or a class, whose first instance is removed.
        """
        self._callback_handler.pop(callback)

    def log(self, logs: results.Metrics, start_time: float | None = None) -> None:
        """Log values to `state.log_history`, the callbacks, the run's log and its trackers.

        Call it on every rank. Only rank 0 writes the run's log. A subclass may override it.

        The run's log and its trackers get no values before the first update of the run, unless training is in progress.

        Args:
            logs: Values by name. The epoch is added to this dict.
            start_time: Ignored. Accepted for compatibility with transformers.
        """
        self._log.write_values(logs)

    # ---------------------------------------------------------------- files

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Write the weights as safetensors, the model's config and the processing class. Every rank must call it.

        Of a model with adapters, such as PEFT's, write the adapters and their config instead. A schedule-free optimizer
        is set to evaluation mode first, until the next training step.

        Args:
            output_dir: Folder to write to. None (the default): `output_dir` of the arguments.
            _internal_call: Whether to skip the upload that the arguments request. Default: False.
        """
        set_optimizer_mode(self.optimizer, is_training=False)
        if list_overridden(type(self), ["_save"]):
            # An overridden _save is called on the main process only, as in transformers; ours is collective.
            if self.accelerator.is_main_process:
                self._save(str(self._get_output_folder(output_dir)))
            self.accelerator.wait_for_everyone()
        else:
            self._save(None if output_dir is None else str(output_dir))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub("Model save")
