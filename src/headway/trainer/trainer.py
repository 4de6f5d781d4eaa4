"""The Trainer: a builder, an evaluator, a log and a loop behind one face, on top of the Accelerator and nothing else."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from headway.accelerator import Accelerator
from headway.config.values import known_keywords
from headway.data.loader import PreparedLoader
from headway.errors import CheckpointError, ConfigError, DataError, Preempted
from headway.forecasting.pretending import is_forecast
from headway.log import get_logger
from headway.memory.monitor import MemoryMonitor
from headway.runtime.collectives.tree import Tree
from headway.runtime.seed import set_seed
from headway.runtime.transfers import move
from headway.trainer import builder, results
from headway.trainer.arguments import TrainingArguments
from headway.trainer.callbacks import DefaultFlowCallback, Events, TrainerControl, TrainerState
from headway.trainer.checkpoints import Continuation, TrainerRecord, check_folder, settings_of
from headway.trainer.data import Batch, Collate, Data, EvalData, check_dataset, length_of, train_sampler
from headway.trainer.display import PrinterCallback, ProgressCallback
from headway.trainer.evaluation.evaluator import Evaluator, StepOutput, num_rows_of, per_sample
from headway.trainer.evaluation.metrics import Measure
from headway.trainer.evaluation.sanity_check import EvaluationSanityCheck
from headway.trainer.legacy import LegacyMembers, check_overrides
from headway.trainer.loop import PreparedTraining, Training, count_updates
from headway.trainer.loss import LossBook, LossFunction, call, loss_among, without_loss
from headway.trainer.optimizer import create_optimizer, create_schedule, decaying_names, stretch_schedule, without_state
from headway.training.prepared.optimizer import PreparedOptimizer
from headway.training.prepared.scheduler import PreparedScheduler

log = get_logger(__name__)


@known_keywords
class Trainer(LegacyMembers):
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
        self.args = args = builder.checked_arguments(model, args)
        builder.check_given_once(
            compute_loss_func=(compute_loss_func, "loss_function", loss_function),
            processing_class=(processing_class, "tokenizer", tokenizer),
            optimizers=(optimizers[0], "optimizer_cls_and_kwargs", optimizer_cls_and_kwargs),
        )
        if optimizers[0] is not None and args.per_device_train_batch_size == "largest":
            raise ConfigError(
                "per_device_train_batch_size='largest' tries updates, which would change the optimizer that you give; let the "
                "Trainer make it (optim, optimizer_cls_and_kwargs), or give a number"
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
        own = builder.default_collator(self.model, self.processing_class)
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
        self._events = Events(
            args, [DefaultFlowCallback()], [*(callbacks or ()), shown], self._get_callback_arguments, self._new_state()
        )
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

    def _overrides(self, *names: str) -> bool:
        """Has a subclass a method of its own by one of these names?"""
        return any(getattr(type(self), name) is not getattr(Trainer, name) for name in names)

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
        made, schedule = self.optimizer, self.lr_scheduler
        made, schedule = without_state(
            made.optimizer if isinstance(made, PreparedOptimizer) else made,
            schedule.scheduler if isinstance(schedule, PreparedScheduler) else schedule,
        )
        given, given_schedule = self._given_optimizers
        self.optimizer = made if given is None else given
        self.lr_scheduler = schedule if given_schedule is None else given_schedule

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

    def compute_loss(
        self, model: torch.nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: int | None = None
    ) -> Any:
        """The batch's loss, a mean; override it for one of your own.

        Args:
            model: prepared.
            inputs: the batch, on the device.
            return_outputs: return (loss, outputs).
            num_items_in_batch: how many labels of the batch count; None: the loss is a mean over samples.

        Raises:
            LossError: the model gives none.
        """
        loss, outputs = self._signature.loss_of(model, inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _prepare_inputs(self, inputs: Batch) -> Batch:
        """What each step does with its batch first; one of a prepared loader is on the device already. May be overridden."""
        return inputs

    # ---------------------------------------------------------------- what a training is built of, for subclasses

    def create_accelerator(self) -> Accelerator:
        """The Accelerator of one training, by the arguments."""
        return builder.create_accelerator(self.args)

    def _loader(
        self, dataset: Data, batch_size: int, sampler: Sampler[int] | None = None, drop_last: bool = False
    ) -> DataLoader[Any]:
        return builder.build_loader(
            self.args, self._signature, dataset, batch_size, self.data_collator, sampler, drop_last
        )

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The training data, not yet prepared.

        Raises:
            DataError: there is none.
        """
        if self.train_dataset is None:
            raise DataError("the Trainer was given no train_dataset, so there is nothing to train on")
        check_dataset(self.train_dataset)
        args, size = self.args, self._train_batch_size
        sampler = self._get_train_sampler(self.train_dataset)
        return self._loader(self.train_dataset, size, sampler, args.dataloader_drop_last)

    def _get_train_sampler(self, train_dataset: Data | None = None) -> Sampler[int] | None:
        """The order of the training data; None for a stream. May be overridden."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return train_sampler(check_dataset(dataset), self.args, self.get_total_train_batch_size())

    def get_total_train_batch_size(self, args: TrainingArguments | None = None) -> int:
        """Samples of one update, over all processes."""
        num_shards = self.accelerator.strategy.data_shard.count
        return self._train_batch_size * self.args.gradient_accumulation_steps * num_shards

    def _get_eval_sampler(self, eval_dataset: Data) -> Sampler[int] | None:
        """The order of evaluation data; None: as it is. May be overridden."""
        return None

    def get_eval_dataloader(self, eval_dataset: Data | str | None = None) -> DataLoader[Any]:
        """The evaluation data, not yet prepared.

        Args:
            eval_dataset: None: the Trainer's own; a name: of one of several.

        Raises:
            DataError: there is none.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str) and isinstance(self.eval_dataset, dict):
            dataset = self.eval_dataset[dataset]
        if dataset is None:
            raise DataError("the Trainer was given no eval_dataset; give one to it or to evaluate()")
        rows = check_dataset(dataset)
        return self._loader(rows, self.args.per_device_eval_batch_size, self._get_eval_sampler(rows))

    def get_test_dataloader(self, test_dataset: Data) -> DataLoader[Any]:
        """The data to predict, not yet prepared."""
        check_dataset(test_dataset)
        sampler = self._get_eval_sampler(test_dataset)
        return self._loader(test_dataset, self.args.per_device_eval_batch_size, sampler)

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

    # ---------------------------------------------------------------- evaluate

    def evaluate(
        self,
        eval_dataset: EvalData | str | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> results.Metrics:
        """The loss and the metrics on the evaluation data; every rank calls it and gets the same.

        The loss is the exact mean over all samples (over all labels that count, where the model has such), on any number of
        processes.

        Args:
            eval_dataset: None: the Trainer's own. A dict of several: each is evaluated under its name.
            ignore_keys: outputs of the model that are not predictions.
            metric_key_prefix: what the metrics' names begin with.

        Returns:
            <prefix>_loss, the metrics, <prefix>_runtime, <prefix>_samples_per_second, <prefix>_steps_per_second, epoch.

        Raises:
            DataError: there is no data.
            ConfigError: `compute_metrics` is neither a function nor a streaming metric.
        """
        several = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(several, dict):
            found: results.Metrics = {}
            for name, dataset in several.items():
                chosen = name if eval_dataset is None else dataset
                found.update(self._evaluate_one(chosen, ignore_keys, f"{metric_key_prefix}_{name}"))
        else:
            found = self._evaluate_one(None if eval_dataset is None else several, ignore_keys, metric_key_prefix)
        self.tell("on_evaluate", metrics=found)
        return found

    def _evaluate_one(self, dataset: Data | str | None, ignored: list[str] | None, prefix: str) -> results.Metrics:
        with self._evaluator.session(self.model, self.optimizer) as session:
            loader = self._eval_loader(dataset)
            if self._overrides("evaluation_loop"):
                found = dict(self.evaluation_loop(loader, "Evaluation", None, ignored, prefix).metrics)
            else:
                measure = self._measure()
                metric = measure.metric(num_rows_of(loader))
                found, _ = self._evaluator.run(session, loader, metric, measure, ignored, prefix)
        self.log(found)
        return found

    def _measure(self, is_loss_only: bool | None = None) -> Measure:
        args = self.args
        return Measure(
            self.compute_metrics,
            args.batch_eval_metrics,
            self.preprocess_logits_for_metrics,
            args.prediction_loss_only if is_loss_only is None else is_loss_only,
        )

    def _eval_loader(self, dataset: Data | str | None) -> PreparedLoader:
        """Of the Trainer's own data, prepared once in a training; of other data each time."""
        if dataset is None or isinstance(dataset, str):
            return self._evaluator.own_loader(dataset or "", lambda: self.get_eval_dataloader(dataset))
        return self._evaluator.prepared(self.get_eval_dataloader(dataset))

    def _own_eval_loaders(self) -> dict[str, PreparedLoader]:
        """By what their metrics' names begin with."""
        if not isinstance(self.eval_dataset, dict):
            return {"eval": self._eval_loader(None)}
        return {f"eval_{name}": self._eval_loader(name) for name in self.eval_dataset}

    def check_evaluation(self) -> None:
        """Try the evaluation on a few rows before the first update; `train` calls it where evaluations are to come.

        It leaves no trace in the training (`trainer.evaluation.sanity_check` says what is put back). Streams are not tried, since
        that would read them, nor is an `evaluate` or `evaluation_loop` of a subclass. `eval_sanity_check=False` switches it off.
        Nothing is tried while `headway estimate --script` forecasts, where tensors have no values.

        Raises:
            MetricError: `compute_metrics` raises.
            ConfigError: `metric_for_best_model` is not among the metrics.
        """
        args = self.args
        if is_forecast() or not args.eval_sanity_check or (args.eval_strategy == "no" and not args.eval_on_start):
            return
        if not self._overrides("evaluate", "evaluation_loop"):
            shared = (self, self.train_dataset, self.eval_dataset, self.processing_class)
            EvaluationSanityCheck(
                args, self.accelerator, self.model, self._evaluator, self, self._measure(), shared
            ).run(self._own_eval_loaders())

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str = "Evaluation",
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> results.EvalLoopOutput:
        """One pass over a loader, with all predictions in host memory; every rank calls it and gets all of them.

        `evaluate` and `predict` call it where a subclass overrides it; without that `evaluate` keeps no predictions that the
        metric does not need.

        Args:
            dataloader: prepared, or not yet.
            description: accepted for the name's sake.
            prediction_loss_only: the loss alone; None: as the arguments say.
            ignore_keys: outputs of the model that are not predictions.
            metric_key_prefix: what the metrics' names begin with.
        """
        with self._evaluator.session(self.model, self.optimizer) as session:
            loader = self._evaluator.prepared(dataloader)
            measure = self._measure(prediction_loss_only)
            return self._evaluator.collect(session, loader, measure, ignore_keys, metric_key_prefix)

    def prediction_loop(self, *args: Any, **kwargs: Any) -> results.EvalLoopOutput:
        """The old name of `evaluation_loop`."""
        return self.evaluation_loop(*args, **kwargs)

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """IndexedRows of a loader's dataset; without a length: batches times their size."""
        rows = length_of(getattr(dataloader, "dataset", None))
        return rows if rows is not None else len(dataloader) * self.args.per_device_eval_batch_size

    def prediction_step(
        self, model: torch.nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> StepOutput:
        """(loss, predictions, labels) of one batch, under no_grad; what is not there is None.

        Args:
            model: in evaluation mode.
            inputs: the batch, on the device.
            prediction_loss_only: leave predictions and labels out.
            ignore_keys: outputs that are not predictions; None: what the model's config says.
        """
        inputs = self._prepare_inputs(inputs)
        bare, labels = self._signature.loss_of.split(inputs)
        with self.accelerator.autocast():
            if labels is not None:
                loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
            else:
                outputs = call(model, bare)
                loss = loss_among(outputs) if self._signature.loss_of.function is None else None
        if prediction_loss_only:
            return loss, None, None
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            ignore_keys = list(getattr(config, "keys_to_ignore_at_inference", None) or ())
        has_loss = loss is not None and self._signature.loss_of.function is None
        num_rows = self._evaluator.num_rows()
        predictions = per_sample(without_loss(outputs, has_loss, ignore_keys), num_rows)
        return loss, predictions, per_sample(labels, num_rows)

    def predict(
        self, test_dataset: Data, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> results.PredictionOutput:
        """Predictions for a dataset, as arrays in its order; every rank gets all of them.

        They lie in host memory together; `iterate_predictions` gives them batch by batch.

        Args:
            test_dataset: with labels or without.
            ignore_keys: outputs of the model that are not predictions.
            metric_key_prefix: what the metrics' names begin with.
        """
        with self._evaluator.session(self.model, self.optimizer):
            loader = self._evaluator.prepared(self.get_test_dataloader(test_dataset))
            predictions, labels, found, _ = self.evaluation_loop(
                loader, "Prediction", False, ignore_keys, metric_key_prefix
            )
        self.tell("on_predict", metrics=found)
        return results.PredictionOutput(predictions, labels, found)

    def iterate_predictions(
        self, test_dataset: Data, ignore_keys: list[str] | None = None
    ) -> Iterator[tuple[Tree, Tree]]:
        """(predictions, labels) batch by batch, on the device, of all ranks; every rank goes through all of it.

        Args:
            test_dataset: with labels or without.
            ignore_keys: outputs of the model that are not predictions.
        """
        with self._evaluator.session(self.model, self.optimizer) as session:
            loader = self._evaluator.prepared(self.get_test_dataloader(test_dataset))
            yield from self._evaluator.iterate(session, loader, self._measure(), ignore_keys)

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

    def _get_callback_arguments(self) -> dict[str, object]:
        return {
            "model": self.model,
            "processing_class": self.processing_class,
            "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler,
            "train_dataloader": self.train_dataloader,
        }

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
            _internal_call: accepted for the name's sake.
        """
        if not self._overrides("_save"):
            self._save(None if output_dir is None else str(output_dir))
            return
        if self.accelerator.is_main_process:
            self._save(str(self._files().folder(output_dir)))
        self.accelerator.wait_for_everyone()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """What `save_model` does; only on rank 0 where a subclass overrides this.

        Args:
            output_dir: None: that of the arguments.
            state_dict: in place of the model's own.
        """
        folder = Path(output_dir or self.args.output_dir or ".")
        self._files().save_model(self.model, self.processing_class, folder, state_dict)

    def _files(self) -> results.TrainerFiles:
        return results.TrainerFiles(self.args, self.accelerator)

    def save_state(self) -> None:
        """Write `trainer_state.json`: how far the training is, and all that was logged. Checkpoints hold the rest."""
        self._files().save_state(self.state)

    def save_metrics(self, split: str, metrics: results.Metrics, combined: bool = True) -> None:
        """Write metrics to `<output_dir>/<split>_results.json`, from the main process.

        Args:
            split: "train", "eval", "test" or "all".
            metrics: by name.
            combined: add them to `all_results.json`, too.
        """
        self._files().save_metrics(split, metrics, combined)

    def create_model_card(self, **about: object) -> None:
        """Write `README.md`: what was trained, and the last evaluation.

        Args:
            about: what else the card says, by name: language, license, dataset, tasks, ...
        """
        self._files().save_card(self.model, self.state, about)
