"""`EvaluationMethods`: the Trainer's methods that compute losses, evaluate and predict. A subclass may override each."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from headway.core.data.loader import PreparedLoader
from headway.core.runtime.collectives.tree import Tree
from headway.core.runtime.dry_run import is_dry_run
from headway.errors import ConfigError, DataError
from headway.trainer import results
from headway.trainer.callbacks import CallbackHandler
from headway.trainer.collation import Collate, LoaderCollator
from headway.trainer.columns import LABEL_NAMES, drop_columns
from headway.trainer.data import Batch, Data, EvalData, check_dataset, get_length
from headway.trainer.evaluation import Evaluator, StepOutput, count_rows, select_per_sample
from headway.trainer.generation import Generator
from headway.trainer.legacy_members import LegacyMembers
from headway.trainer.logs import Log
from headway.trainer.loss import call_model, drop_loss, find_named_loss
from headway.trainer.metrics import MetricSettings
from headway.trainer.overrides import list_overridden
from headway.trainer.packing import Packer
from headway.trainer.sanity_check import EvaluationSanityCheck
from headway.trainer.signature import ForwardSignature
from headway.trainer.source_losses import collate_sources, find_mixture


class EvaluationMethods(LegacyMembers):
    """Methods of the Trainer that process batches without updates: losses, evaluations and predictions.

    The Trainer's constructor sets all attributes.

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
    _callback_handler: CallbackHandler
    _signature: ForwardSignature
    _packer: Packer
    _evaluator: Evaluator
    _log: Log
    _generation_options: dict[str, Any]

    def compute_loss(
        self, model: torch.nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: int | None = None
    ) -> Any:
        """Return the mean loss of a batch. Override this method to compute a different loss.

        Args:
            model: Prepared model.
            inputs: Batch on the device.
            return_outputs: Whether to return a pair of (loss, outputs) instead of the loss. Default: False.
            num_items_in_batch: Number of labels in `inputs` that are not ignored. It is passed to a loss function that accepts
                this argument, and has no other effect. None (the default): the number is unknown, as in evaluations. In
                transformers' Trainer, this number covers the whole update instead.

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
            drop_last: Whether to omit a last batch with fewer rows. Default: False.
            packed_collator: Collate function of packed sequences. None: the packer's if the dataset is a `PackedDataset`, else
                the Trainer's.
            is_training: Whether the loader is for training. If its data is a mixture whose losses can be logged by
                source, batches contain the source of each row. Default: False.
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
            eval_dataset: Dataset, or the name of one of the Trainer's evaluation datasets. None (the default): the
                Trainer's only evaluation dataset.

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
        **gen_kwargs: Any,
    ) -> results.Metrics:
        """Return the loss and the metrics on the evaluation data. Every rank must call it, and all get equal results.

        During the evaluation, the model is in evaluation mode, and no gradients are computed. The result is also logged.
        The loss is the exact mean over all samples. If the model predicts a label per token, it is the mean over all
        labels that are not ignored. It does not depend on the number of processes.

        Args:
            eval_dataset: Dataset to evaluate, or the name of one of the Trainer's evaluation datasets. With a dict of
                several datasets, each is evaluated with the prefix `<metric_key_prefix>_<name>`, as in
                "eval_<name>_loss". None (the default): the Trainer's own.
            ignore_keys: Names of model outputs that are not predictions. None (the default): those that the model's
                config names.
            metric_key_prefix: Prefix of the metrics' names. Default: "eval".
            gen_kwargs: Arguments of `model.generate`, with `predict_with_generate`.

        Returns:
            <prefix>_loss, the metrics, <prefix>_runtime, <prefix>_samples_per_second, <prefix>_steps_per_second, epoch.

        Raises:
            DataError: If there is no evaluation data.
            ConfigError: If `compute_metrics` is neither a function nor a streaming metric, or `gen_kwargs` are given
                without `predict_with_generate`.
            MetricError: If `compute_metrics` returns neither a dict nor a number.
        """
        datasets = self.eval_dataset if eval_dataset is None else eval_dataset
        with self._use_generation_options(gen_kwargs):
            if isinstance(datasets, dict):
                metrics: results.Metrics = {}
                for name, dataset in datasets.items():
                    # The Trainer's own datasets are identified by name, so that their loaders are prepared only once.
                    name_or_dataset = name if eval_dataset is None else dataset
                    metrics.update(self._evaluate_one(name_or_dataset, ignore_keys, f"{metric_key_prefix}_{name}"))
            else:
                own_or_given = None if eval_dataset is None else datasets
                metrics = self._evaluate_one(own_or_given, ignore_keys, metric_key_prefix)
        self._callback_handler.call_event("on_evaluate", metrics=metrics)
        return metrics

    @contextmanager
    def _use_generation_options(self, options: dict[str, Any]) -> Iterator[None]:
        """Return a context in which predictions are generated with these arguments of `model.generate`.

        Afterward, the previous arguments apply again: none, unless evaluations are nested.

        Raises:
            ConfigError: If there are any without `predict_with_generate`.
        """
        if options and not self.args.predict_with_generate:
            raise ConfigError(
                f"{', '.join(sorted(options))}: arguments of generate() need TrainingArguments(predict_with_generate=True)"
            )
        previous, self._generation_options = self._generation_options, options
        try:
            yield
        finally:
            self._generation_options = previous

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
        """Return the metric settings for an evaluation or a prediction.

        Args:
            is_loss_only: Whether to compute only the loss. None (the default): `args.prediction_loss_only`.
        """
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

        `train` calls it if the training run includes evaluations. Every rank must call it. It does not affect training:
        the global RNG states, and the buffers and training modes of all modules, are restored afterward.

        There is no check with `eval_sanity_check=False`, or if a subclass overrides `evaluate` or `evaluation_loop`.
        Iterable datasets are skipped, because the check would consume them, and so are loaders with a custom batch
        sampler. A forecast by `headway estimate --script` skips it too, because its tensors have no values.

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
            prediction_loss_only: Whether to compute only the loss. None (the default): the value in the arguments.
            ignore_keys: Names of model outputs that are not predictions. None (the default): those that the model's
                config names.
            metric_key_prefix: Prefix of the metrics' names. Default: "eval".
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
        self,
        model: torch.nn.Module,
        inputs: Batch,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> StepOutput:
        """Return the loss, the predictions and the labels of one batch. The caller disables gradients.

        Missing values are None. Of predictions and labels, only tensors with one row per sample are returned: a single
        tensor, or a tuple of several. With `predict_with_generate`, predictions are generated tokens.

        Args:
            model: Model in evaluation mode.
            inputs: Batch on the device.
            prediction_loss_only: Whether to omit predictions and labels.
            ignore_keys: Names of model outputs that are not predictions. None (the default): those that the model's
                config names.
            gen_kwargs: Arguments of `model.generate`, with `predict_with_generate`. If there are none, those of the
                call of `evaluate` or `predict` in progress are used.
        """
        inputs = self._prepare_inputs(inputs)
        if self.args.predict_with_generate and not prediction_loss_only:
            return self._generate_predictions(model, inputs, gen_kwargs or self._generation_options)
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

    def _generate_predictions(self, model: torch.nn.Module, inputs: Batch, options: dict[str, Any]) -> StepOutput:
        """Return a batch's loss, the generated tokens, and the labels. Without labels, the loss and the labels are None.

        Tokens and labels are padded to equal width. The loss takes a forward pass in addition to the generation.

        Args:
            model: Model in evaluation mode.
            inputs: Batch on the device.
            options: Arguments of `model.generate`.
        """
        generator = Generator(self.accelerator, self.args, self.processing_class, options)
        labels = self._signature.batch_loss.split_labels(inputs)[1]
        generation_inputs = inputs
        if isinstance(inputs, Mapping):
            label_names = {*self._signature.label_names, *LABEL_NAMES}
            generation_inputs = {name: value for name, value in inputs.items() if name not in label_names}
        tokens, filled_labels = generator.generate(model, generation_inputs, labels)
        loss = None
        if labels is not None:
            with self.accelerator.autocast():
                loss = self.compute_loss(model, inputs)
        return loss, tokens, select_per_sample(filled_labels, self._evaluator.get_num_rows())

    @torch.no_grad()
    def predict(
        self,
        test_dataset: Data,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **gen_kwargs: Any,
    ) -> results.PredictionOutput:
        """Return predictions for a dataset as arrays, in the order of the dataset.

        Every rank must call it, and each gets the predictions of all ranks.

        All predictions are in host memory at once. `iterate_predictions` yields them batch by batch instead.

        Args:
            test_dataset: Dataset with or without labels.
            ignore_keys: Names of model outputs that are not predictions. None (the default): those that the model's
                config names.
            metric_key_prefix: Prefix of the metrics' names. Default: "test".
            gen_kwargs: Arguments of `model.generate`, with `predict_with_generate`.

        Raises:
            ConfigError: If `gen_kwargs` are given without `predict_with_generate`.
        """
        with self._use_generation_options(gen_kwargs), self._evaluator.open_session(self.model, self.optimizer):
            loader = self._evaluator.prepare_loader(self.get_test_dataloader(test_dataset))
            output = self.evaluation_loop(loader, "Prediction", False, ignore_keys, metric_key_prefix)
            predictions, labels, metrics, _ = output  # an override may return a plain tuple
        self._callback_handler.call_event("on_predict", metrics=metrics)
        return results.PredictionOutput(predictions, labels, metrics)

    def iterate_predictions(
        self, test_dataset: Data, ignore_keys: list[str] | None = None
    ) -> Iterator[tuple[Tree, Tree]]:
        """Yield pairs of (predictions, labels), one pair per batch.

        The values are gathered from all ranks and are on the device. Every rank must iterate to the end. Until then,
        the model is in evaluation mode.

        Args:
            test_dataset: Dataset with or without labels.
            ignore_keys: Names of model outputs that are not predictions. None (the default): those that the model's
                config names.
        """
        with self._evaluator.open_session(self.model, self.optimizer) as session:
            loader = self._evaluator.prepare_loader(self.get_test_dataloader(test_dataset))
            yield from self._evaluator.iterate_predictions(session, loader, self._make_metric_settings(), ignore_keys)
