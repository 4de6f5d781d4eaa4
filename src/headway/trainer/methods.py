"""The Trainer's methods that compute losses, evaluate and predict, and members that transformers' Trainer has.

A subclass may override each of these methods. The other members exist for scripts written for transformers' Trainer.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from headway.core.data.loader import PreparedLoader
from headway.core.runtime.collectives.tree import Tree
from headway.core.runtime.dry_run import is_dry_run
from headway.core.weights.export import copy_files
from headway.errors import ConfigError, DataError
from headway.trainer import results
from headway.trainer.argument_names import GENERAL_ADVICE, UnknownMembers
from headway.trainer.callbacks import Events
from headway.trainer.collation import Collate, LoaderCollator
from headway.trainer.columns import LABEL_NAMES, drop_columns
from headway.trainer.data import Batch, Data, EvalData, check_dataset, get_length
from headway.trainer.evaluation import Evaluator, StepOutput, count_rows, select_per_sample
from headway.trainer.logs import FileMethods, Log
from headway.trainer.loss import call_model, drop_loss, find_named_loss
from headway.trainer.metrics import MetricSettings
from headway.trainer.optimizer import set_optimizer_mode
from headway.trainer.packing import Packer
from headway.trainer.sanity_check import EvaluationSanityCheck
from headway.trainer.signature import ForwardSignature
from headway.trainer.source_losses import collate_sources, find_mixture

_NEVER_CALLED = frozenset(
    """
    _clip_grad_norm _determine_best_metric _evaluate _finalize_training _finish_current_push _get_dataloader
    _get_num_items_in_batch _get_output_dir _hp_search_setup _inner_training_loop _load_best_model
    _load_callback_state _load_from_checkpoint _load_optimizer_and_scheduler _load_rng_state _load_scaler
    _maybe_log_save_evaluate _prepare_for_training _push_from_checkpoint _run_epoch _save_checkpoint
    _save_optimizer_and_scheduler _save_rng_state _save_scaler _wrap_model create_accelerator_and_postprocess
    get_batch_samples init_hf_repo set_initial_training_values
    """.split()  # noqa: SIM905
)
"""Methods of transformers' Trainer that Headway never calls.

An override of such a method would silently have no effect.
"""


def list_overridden(trainer_class: type, names: Iterable[str]) -> list[str]:
    """Return a sorted list of the given names whose methods a subclass of the Trainer overrides.

    Args:
        trainer_class: Subclass of the Trainer.
        names: Names of methods.
    """
    user_classes = [each for each in trainer_class.__mro__ if not each.__module__.startswith("headway.")]
    return sorted(name for name in names if any(name in vars(each) for each in user_classes))


def check_overrides(trainer_class: type) -> None:
    """Raise an error if a subclass overrides methods that Headway never calls.

    Args:
        trainer_class: Subclass of the Trainer.

    Raises:
        ConfigError: If there are such overrides. The message names them.
    """
    overridden = list_overridden(trainer_class, _NEVER_CALLED)
    if overridden:
        raise ConfigError(
            f"{trainer_class.__name__} overrides methods that Headway never calls: {', '.join(overridden)}; use callbacks, "
            f"or one of the methods that may be overridden. {GENERAL_ADVICE}"
        )


class _PublishedFiles:
    """Writer of the model card and the training arguments of a model that is published.

    It has the method `save_pretrained`, so that it can be published like a model.

    Args:
        folder: Folder that contains the model card.
        arguments: Training arguments as JSON text.
    """

    def __init__(self, folder: Path, arguments: str) -> None:
        self._folder = folder
        self._arguments = arguments

    def save_pretrained(self, folder: Path) -> None:
        """Write the model card and the training arguments to `folder`. The weights are not written here."""
        copy_files(self._folder, folder, ["README.md"])
        (folder / "training_args.json").write_text(self._arguments + "\n")


class LegacyMembers(FileMethods, UnknownMembers):
    """Members of transformers' Trainer that scripts use, implemented by the corresponding members of Headway's Trainer.

    Attributes:
        optimizer: Optimizer of the Trainer. None before it is created.
        is_deepspeed_enabled: Always False.
        is_fsdp_enabled: Always False.
        is_model_parallel: Always False.
        place_model_on_device: Always True.
    """

    optimizer: Any
    is_deepspeed_enabled = is_fsdp_enabled = is_model_parallel = False
    place_model_on_device = True

    @property
    def model_wrapped(self) -> torch.nn.Module:
        """The model itself. Headway prepares it in place, so there is no separate wrapper."""
        return self.model

    @property
    def tokenizer(self) -> Any:
        """Processing class (such as a tokenizer), under its older name."""
        return self.processing_class

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """Return a context manager that enables the run's mixed precision.

        Args:
            cache_enabled: Ignored. Accepted for compatibility with transformers.
        """
        return self.accelerator.autocast()

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Return the context manager in which `training_step` computes the loss.

        It enables the run's mixed precision.
        """
        return self.accelerator.autocast()

    def get_num_trainable_parameters(self) -> int:
        """Return the number of elements in parameters that require gradients."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """Return the learning rate of each parameter group.

        Raises:
            ConfigError: If there is no optimizer yet.
        """
        return [float(group["lr"]) for group in self.get_optimizer_group()]

    def get_optimizer_group(self, param: torch.Tensor | None = None) -> Any:
        """Return the optimizer's parameter groups, or the group that contains a given parameter.

        Return None if no group contains the given parameter.

        Args:
            param: Parameter whose group is returned. None: return all groups as a list.

        Raises:
            ConfigError: If there is no optimizer yet.
        """
        if self.optimizer is None:
            raise ConfigError("there is no optimizer before train(); create_optimizer() makes one")
        groups = self.optimizer.param_groups
        if param is None:
            return list(groups)
        return next((group for group in groups if any(param is each for each in group["params"])), None)

    def is_world_process_zero(self) -> bool:
        """Whether this process has global rank 0."""
        return self.accelerator.is_main_process

    def is_local_process_zero(self) -> bool:
        """Whether this process is the first one on its machine."""
        return self.accelerator.is_local_main_process

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> str | None:
        """Upload the model, its config, the processing class, the arguments and a model card to the Hub.

        Every rank must call it. The repository is the arguments' `hub_model_id`, or has the name of `output_dir`.

        Args:
            commit_message: Message of the commit.
            blocking: Ignored. Accepted for compatibility with transformers. The call always waits until the upload is
                complete.
            token: Token for the Hub. None: `hub_token` of the arguments.
            revision: Branch to upload to. None: `hub_revision` of the arguments.
            kwargs: Additional entries of the model card, as in `create_model_card`.

        Returns:
            URL of the commit on the main process; None on other processes.
        """
        args = self.args
        set_optimizer_mode(self.optimizer, is_training=False)
        self.create_model_card(**kwargs)
        folder = args.folder
        return self.accelerator.push_to_hub(
            self.model,
            args.hub_model_id or folder.absolute().name,
            self.processing_class,
            _PublishedFiles(folder, args.to_json_string()),
            private=args.hub_private_repo,
            token=token or args.hub_token,
            revision=revision or args.hub_revision,
            commit_message=commit_message or "End of training",
        )

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print metrics from the main process, one per line.

        Args:
            split: Name of the data, such as "train", for the heading.
            metrics: Values by name.
        """
        if self.accelerator.is_main_process:
            print(f"***** {split} metrics *****")
            for name, value in sorted(metrics.items()):
                print(f"  {name} = {value}")


class EvaluationMethods(LegacyMembers):
    """Methods of the Trainer that process batches without updates: losses, evaluations and predictions.

    Attributes:
        data_collator: Collate function of the Trainer's loaders.
        train_dataset: Training data, or None.
        eval_dataset: Evaluation data, a dict of several datasets, or None.
        compute_metrics: Function of an `EvalPrediction`, or a metric object. None: only the loss is computed.
        preprocess_logits_for_metrics: Function of (predictions, labels) that returns the part of the predictions to
            keep, or None.
    """

    data_collator: Collate
    train_dataset: Data | None
    eval_dataset: EvalData | None
    compute_metrics: object
    preprocess_logits_for_metrics: Callable[[Tree, Tree], Tree] | None
    _events: Events
    _signature: ForwardSignature
    _packer: Packer
    _evaluator: Evaluator
    _log: Log

    def compute_loss(
        self, model: torch.nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: int | None = None
    ) -> Any:
        """Return the mean loss of a batch. Override this method to compute a different loss.

        Args:
            model: Prepared model.
            inputs: Batch on the device.
            return_outputs: Whether to return a pair of (loss, outputs) instead of the loss. Default: False.
            num_items_in_batch: Number of labels in `inputs` that are not ignored, if the loss is a mean over these labels.
                None: the loss is a mean over samples. In transformers' Trainer, this number covers the whole update instead.

        Raises:
            LossError: If the model returns no loss, or its forward does not accept the batch.
        """
        loss, outputs = self._signature.batch_loss(model, inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _prepare_inputs(self, inputs: Batch) -> Batch:
        """Return the batch for a training or prediction step, unchanged.

        Every step calls it, and a subclass may override it.

        Nothing has to be done, because a prepared loader has already moved the batch to the device.
        """
        return inputs

    # ---------------------------------------------------------------- data

    def _make_loader(
        self,
        dataset: Data,
        batch_size: int,
        sampler: Sampler[int] | None = None,
        drop_last: bool = False,
        packed_collator: Collate | None = None,
        is_training: bool = False,
    ) -> DataLoader[Any]:
        """Create a loader of batches that the model accepts. It is not prepared yet.

        Args:
            dataset: Dataset with all of its columns.
            batch_size: Rows per batch.
            sampler: Sampler of the rows. None: the order of the dataset.
            drop_last: Whether to omit a last batch with fewer rows.
            packed_collator: Collate function of packed sequences. None: the packer's if the dataset is a `PackedDataset`, else
                the Trainer's.
            is_training: Whether the loader is for training. If its data is a mixture whose losses can be logged by
                source, batches contain the source of each row.
        """
        args, signature = self.args, self._signature
        collator = packed_collator or self._packer.choose_collator(dataset, self.model)
        kept_columns = signature.kept_columns
        if collator is not None and kept_columns is not None:
            kept_columns = {*kept_columns, "position_ids"}  # a forward may accept it among its keyword arguments
        label_names = {*signature.label_names, *LABEL_NAMES}
        has_sources = is_training and self._can_divide_loss(dataset)
        return DataLoader(
            drop_columns(dataset, signature.kept_columns, label_names),
            batch_size=batch_size,
            sampler=sampler,
            collate_fn=LoaderCollator(
                collator or self.data_collator,
                kept_columns,
                signature.batch_loss.count_labels,
                label_names,
                collate_sources if has_sources else None,
            ),
            drop_last=drop_last,
            num_workers=args.dataloader_num_workers,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
        )

    def _can_divide_loss(self, dataset: Data) -> bool:
        """Whether the loss can be logged by source: the data is a mixture, and the loss is the model's own."""
        return self._signature.batch_loss.function is None and find_mixture(dataset) is not None

    def _pack_dataset(self, dataset: Any, is_training: bool) -> Any:
        """Return the dataset with its samples packed into sequences, or unchanged if packing was not requested.

        Args:
            dataset: Dataset to pack.
            is_training: Whether it is training data, which is packed in a random order if the arguments request it.
        """
        return self._packer.pack(dataset, self.model, self._signature.kept_columns, is_training=is_training)

    def _get_eval_sampler(self, eval_dataset: Data) -> Sampler[int] | None:
        """Return the sampler of evaluation data, or None for the order of the dataset. A subclass may override it."""
        return None

    def get_eval_dataloader(self, eval_dataset: Data | str | None = None) -> DataLoader[Any]:
        """Return a loader of the evaluation data. It is not prepared yet.

        Args:
            eval_dataset: Dataset, or the name of one of the Trainer's evaluation datasets. None: the Trainer's only
                evaluation dataset.

        Raises:
            DataError: If there is no evaluation data, if it is not a dataset, or if there are several and none is chosen.
            KeyError: If the Trainer has several evaluation datasets, but none with this name.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str) and isinstance(self.eval_dataset, dict):
            dataset = self.eval_dataset[dataset]
        elif isinstance(dataset, dict):
            raise DataError(f"there are several evaluation datasets; choose one by its name: {', '.join(dataset)}")
        if dataset is None:
            raise DataError("the Trainer was given no eval_dataset; give one to it or to evaluate()")
        rows = check_dataset(dataset)
        if self.compute_metrics is None:  # a metric may treat each row as one sample
            rows = self._pack_dataset(rows, is_training=False)
        return self._make_loader(rows, self.args.per_device_eval_batch_size, self._get_eval_sampler(rows))

    def get_test_dataloader(self, test_dataset: Data) -> DataLoader[Any]:
        """Return a loader of the data to predict. It is not prepared yet.

        Args:
            test_dataset: Dataset to predict.

        Raises:
            DataError: If the argument is not a dataset.
        """
        check_dataset(test_dataset)
        sampler = self._get_eval_sampler(test_dataset)
        return self._make_loader(test_dataset, self.args.per_device_eval_batch_size, sampler)

    # ---------------------------------------------------------------- evaluate

    def evaluate(
        self,
        eval_dataset: EvalData | str | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> results.Metrics:
        """Return the loss and the metrics on the evaluation data. Every rank must call it, and all get equal results.

        The loss is the exact mean over all samples. If the model predicts a label per token, it is the mean over all
        labels that are not ignored. It does not depend on the number of processes.

        Args:
            eval_dataset: Dataset to evaluate, or the name of one of the Trainer's evaluation datasets. With a dict of
                several datasets, each is evaluated under its name. None: the Trainer's own.
            ignore_keys: Names of model outputs that are not predictions. None: those that the model's config names.
            metric_key_prefix: Prefix of the metrics' names.

        Returns:
            <prefix>_loss, the metrics, <prefix>_runtime, <prefix>_samples_per_second, <prefix>_steps_per_second, epoch.

        Raises:
            DataError: If there is no evaluation data.
            ConfigError: If `compute_metrics` is neither a function nor a streaming metric.
            MetricError: If `compute_metrics` returns neither a dict nor a number.
        """
        datasets = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(datasets, dict):
            metrics: results.Metrics = {}
            for name, dataset in datasets.items():
                # The Trainer's own datasets are identified by name, so that their loaders are prepared only once.
                name_or_dataset = name if eval_dataset is None else dataset
                metrics.update(self._evaluate_one(name_or_dataset, ignore_keys, f"{metric_key_prefix}_{name}"))
        else:
            own_or_given = None if eval_dataset is None else datasets
            metrics = self._evaluate_one(own_or_given, ignore_keys, metric_key_prefix)
        self._events.call_event("on_evaluate", metrics=metrics)
        return metrics

    @torch.no_grad()
    def _evaluate_one(self, dataset: Data | str | None, ignore_keys: list[str] | None, prefix: str) -> results.Metrics:
        """Evaluate one dataset, log the metrics, and return them.

        Args:
            dataset: Dataset, or the name of one of the Trainer's evaluation datasets. None: the Trainer's own.
            ignore_keys: Names of model outputs that are not predictions. None: those that the model's config names.
            prefix: Prefix of the metrics' names.
        """
        with self._evaluator.open_session(self.model, self.optimizer) as session:
            loader = self._get_eval_loader(dataset)
            self._packer.check_model(self.accelerator, session.model, loader.dataset)
            if list_overridden(type(self), ["evaluation_loop"]):
                metrics = dict(self.evaluation_loop(loader, "Evaluation", None, ignore_keys, prefix).metrics)
            else:
                metric_settings = self._make_metric_settings()
                metric = metric_settings.make_metric(count_rows(loader))
                metrics, _ = self._evaluator.run_pass(session, loader, metric, metric_settings, ignore_keys, prefix)
        self.log(metrics)
        return metrics

    def _make_metric_settings(self, is_loss_only: bool | None = None) -> MetricSettings:
        args = self.args
        return MetricSettings(
            self.compute_metrics,
            args.batch_eval_metrics,
            self.preprocess_logits_for_metrics,
            args.prediction_loss_only if is_loss_only is None else is_loss_only,
        )

    def _get_eval_loader(self, dataset: Data | str | None) -> PreparedLoader:
        """Return a prepared loader of evaluation data.

        During a training run, the loader of the Trainer's own data is prepared only once. Outside of a run, and for
        other datasets, a new loader is prepared at each call.

        Args:
            dataset: Dataset, or the name of one of the Trainer's evaluation datasets. None: the Trainer's own.
        """
        if dataset is None or isinstance(dataset, str):
            return self._evaluator.get_own_loader(dataset or "", lambda: self.get_eval_dataloader(dataset))
        return self._evaluator.prepare_loader(self.get_eval_dataloader(dataset))

    def _get_own_eval_loaders(self) -> dict[str, PreparedLoader]:
        """Return a dict with the prepared loader of each evaluation dataset, by the prefix of the dataset's metrics.

        With a single evaluation dataset, the prefix is "eval".
        """
        if not isinstance(self.eval_dataset, dict):
            return {"eval": self._get_eval_loader(None)}
        return {f"eval_{name}": self._get_eval_loader(name) for name in self.eval_dataset}

    def check_evaluation(self) -> None:
        """Run the evaluation on a few rows before the first update, so that errors in it occur early.

        `train` calls it if the training run includes evaluations. It does not affect training:
        `headway.trainer.evaluation` describes what is restored. Iterable datasets are skipped, because the check
        would consume them, and so are loaders with a custom batch sampler. There is no check with
        `eval_sanity_check=False`, or if a subclass overrides `evaluate` or `evaluation_loop`. There is none during
        a forecast by `headway estimate --script` either, because its tensors have no values.

        Every rank must call it.

        Raises:
            MetricError: If `compute_metrics` raises, or the check failed on another rank only.
            ConfigError: If `metric_for_best_model` is not among the metrics or not a number.
        """
        args = self.args
        if is_dry_run() or not args.eval_sanity_check or (args.eval_strategy == "no" and not args.eval_on_start):
            return
        if not list_overridden(type(self), ["evaluate", "evaluation_loop"]):
            shared = (self, self.train_dataset, self.eval_dataset, self.processing_class)
            EvaluationSanityCheck(
                args, self.accelerator, self.model, self._evaluator, self, self._make_metric_settings(), shared
            ).run(self._get_own_eval_loaders())

    @torch.no_grad()
    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str = "Evaluation",
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> results.EvalLoopOutput:
        """Run one pass over a loader and return all predictions in host memory.

        Every rank must call it, and all get the predictions of all ranks. `evaluate` and `predict` call it only if a
        subclass overrides it. Otherwise `evaluate` keeps no predictions that the metric does not need.

        Args:
            dataloader: Loader, prepared or not.
            description: Ignored. Accepted for compatibility with transformers.
            prediction_loss_only: Whether to compute only the loss. None: the value in the arguments.
            ignore_keys: Names of model outputs that are not predictions. None: those that the model's config names.
            metric_key_prefix: Prefix of the metrics' names.
        """
        with self._evaluator.open_session(self.model, self.optimizer) as session:
            loader = self._evaluator.prepare_loader(dataloader)
            metric_settings = self._make_metric_settings(prediction_loss_only)
            return self._evaluator.run_and_collect(session, loader, metric_settings, ignore_keys, metric_key_prefix)

    def prediction_loop(self, *args: Any, **kwargs: Any) -> results.EvalLoopOutput:
        """Call `evaluation_loop`. Older name for compatibility."""
        return self.evaluation_loop(*args, **kwargs)

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Return the number of rows in a loader's dataset.

        If the dataset has no length, return the number of batches times `per_device_eval_batch_size`.
        """
        rows = get_length(getattr(dataloader, "dataset", None))
        return rows if rows is not None else len(dataloader) * self.args.per_device_eval_batch_size

    def prediction_step(
        self, model: torch.nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> StepOutput:
        """Return the loss, the predictions and the labels of one batch. The caller disables gradients.

        Missing values are None. Of predictions and labels, only tensors with one row per sample are returned: a single
        tensor, or a tuple of several.

        Args:
            model: Model in evaluation mode.
            inputs: Batch on the device.
            prediction_loss_only: Whether to omit predictions and labels.
            ignore_keys: Names of model outputs that are not predictions. None: those that the model's config names.
        """
        inputs = self._prepare_inputs(inputs)
        model_inputs, labels = self._signature.batch_loss.split_labels(inputs)
        with self.accelerator.autocast():
            if labels is not None:
                loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
            else:
                outputs = call_model(model, model_inputs)
                loss = find_named_loss(outputs) if self._signature.batch_loss.function is None else None
        if prediction_loss_only:
            return loss, None, None
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            ignore_keys = list(getattr(config, "keys_to_ignore_at_inference", None) or ())
        has_loss = loss is not None and self._signature.batch_loss.function is None
        num_rows = self._evaluator.get_num_rows()
        predictions = select_per_sample(drop_loss(outputs, has_loss, ignore_keys), num_rows)
        return loss, predictions, select_per_sample(labels, num_rows)

    @torch.no_grad()
    def predict(
        self, test_dataset: Data, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> results.PredictionOutput:
        """Return predictions for a dataset as arrays, in the order of the dataset.

        Every rank must call it, and each gets the predictions of all ranks.

        All predictions are in host memory at once. `iterate_predictions` yields them batch by batch instead.

        Args:
            test_dataset: Dataset with or without labels.
            ignore_keys: Names of model outputs that are not predictions. None: those that the model's config names.
            metric_key_prefix: Prefix of the metrics' names.
        """
        with self._evaluator.open_session(self.model, self.optimizer):
            loader = self._evaluator.prepare_loader(self.get_test_dataloader(test_dataset))
            output = self.evaluation_loop(loader, "Prediction", False, ignore_keys, metric_key_prefix)
            predictions, labels, metrics, _ = output  # an override may return a plain tuple
        self._events.call_event("on_predict", metrics=metrics)
        return results.PredictionOutput(predictions, labels, metrics)

    def iterate_predictions(
        self, test_dataset: Data, ignore_keys: list[str] | None = None
    ) -> Iterator[tuple[Tree, Tree]]:
        """Yield pairs of (predictions, labels), one pair per batch.

        The values are gathered from all ranks and are on the device. Every rank must iterate to the end. Until then,
        the model is in evaluation mode.

        Args:
            test_dataset: Dataset with or without labels.
            ignore_keys: Names of model outputs that are not predictions. None: those that the model's config names.
        """
        with self._evaluator.open_session(self.model, self.optimizer) as session:
            loader = self._evaluator.prepare_loader(self.get_test_dataloader(test_dataset))
            yield from self._evaluator.iterate_predictions(session, loader, self._make_metric_settings(), ignore_keys)
