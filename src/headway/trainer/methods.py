"""The Trainer's methods that compute losses, evaluate and predict, each of which a subclass may override; small old names."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from headway.data.loader import PreparedLoader
from headway.errors import ConfigError, DataError
from headway.forecasting import is_forecast
from headway.runtime.collectives.tree import Tree
from headway.trainer import builder, results
from headway.trainer.argument_checks import OTHERWISE, UnknownMembers
from headway.trainer.callbacks import Events
from headway.trainer.data import Batch, Collate, Collating, Data, EvalData, check_dataset, drop_columns, length_of
from headway.trainer.evaluation import EvaluationSanityCheck, Evaluator, StepOutput, num_rows_of, per_sample
from headway.trainer.loss import call, loss_among, without_loss
from headway.trainer.metrics import Measure
from headway.weights.export import copy_files

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
"""Methods of transformers' Trainer that an override of would silently do nothing here."""


def overridden(kind: type, names: Iterable[str]) -> list[str]:
    """Which of these methods of the Trainer a subclass has of its own."""
    theirs = [each for each in kind.__mro__ if not each.__module__.startswith("headway.")]
    return sorted(name for name in names if any(name in vars(each) for each in theirs))


def check_overrides(kind: type) -> None:
    """Refuse a subclass whose overrides would never be called.

    Raises:
        ConfigError: naming them.
    """
    found = overridden(kind, _NEVER_CALLED)
    if found:
        raise ConfigError(
            f"{kind.__name__} overrides methods that Headway never calls: {', '.join(found)}; use callbacks, or one of the methods "
            f"that may be overridden. {OTHERWISE}"
        )


class _Records:
    """The model card and the arguments, written where a model is published.

    Args:
        home: has the card.
        arguments: as JSON.
    """

    def __init__(self, home: Path, arguments: str) -> None:
        self._home, self._arguments = home, arguments

    def save_pretrained(self, folder: Path) -> None:
        """Write them."""
        copy_files(self._home, folder, ["README.md"])
        (folder / "training_args.json").write_text(self._arguments + "\n")


class LegacyMembers(results.FileMethods, UnknownMembers):
    """Small names that scripts ask of transformers' Trainer, each by what the Trainer has itself."""

    optimizer: Any
    is_deepspeed_enabled = is_fsdp_enabled = is_model_parallel = False
    place_model_on_device = True

    @property
    def model_wrapped(self) -> torch.nn.Module:
        """The model: it is prepared in its place."""
        return self.model

    @property
    def tokenizer(self) -> Any:
        """The processing class by its old name."""
        return self.processing_class

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """The run's mixed precision, for a block."""
        return self.accelerator.autocast()

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """The same: what `training_step` computes the loss in."""
        return self.accelerator.autocast()

    def get_num_trainable_parameters(self) -> int:
        """Numbers in parameters that learn."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """Of each group of parameters.

        Raises:
            ConfigError: there is no optimizer yet.
        """
        return [float(group["lr"]) for group in self.get_optimizer_group()]

    def get_optimizer_group(self, param: torch.Tensor | None = None) -> Any:
        """The groups of parameters, or the one that a parameter is in.

        Raises:
            ConfigError: there is no optimizer yet.
        """
        if self.optimizer is None:
            raise ConfigError("there is no optimizer before train(); create_optimizer() makes one")
        groups = self.optimizer.param_groups
        if param is None:
            return list(groups)
        return next((group for group in groups if any(param is each for each in group["params"])), None)

    def is_world_process_zero(self) -> bool:
        """Is this process rank 0 of all machines?"""
        return self.accelerator.is_main_process

    def is_local_process_zero(self) -> bool:
        """Is this the first process of its machine?"""
        return self.accelerator.is_local_main_process

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> str | None:
        """Upload the model, its config, the processing class, the arguments and a model card to the Hub; every rank calls it.

        The repository is the arguments' `hub_model_id`, or the name of `output_dir`.

        Args:
            commit_message: the commit's message.
            blocking: accepted for compatibility; the upload has always ended when this returns.
            token, revision: None: those of the arguments.
            kwargs: more for the model card, as for `create_model_card`.

        Returns:
            The commit's URL on the main process, None elsewhere.
        """
        args = self.args
        self.create_model_card(**kwargs)
        home = args.folder
        return self.accelerator.push_to_hub(
            self.model,
            args.hub_model_id or home.absolute().name,
            self.processing_class,
            _Records(home, args.to_json_string()),
            private=args.hub_private_repo,
            token=token or args.hub_token,
            revision=revision or args.hub_revision,
            commit_message=commit_message or "End of training",
        )

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print metrics, one a line, from the main process."""
        if self.accelerator.is_main_process:
            print(f"***** {split} metrics *****")
            for name, value in sorted(metrics.items()):
                print(f"  {name} = {value}")


class EvaluationMethods(LegacyMembers):
    """Half of a Trainer: what it does with a batch, without updates."""

    data_collator: Collate
    train_dataset: Data | None
    eval_dataset: EvalData | None
    compute_metrics: object
    preprocess_logits_for_metrics: Callable[[Tree, Tree], Tree] | None
    _events: Events
    _signature: builder.ForwardSignature
    _evaluator: Evaluator
    _log: results.Log

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

    # ---------------------------------------------------------------- its data

    def _loader(
        self, dataset: Data, batch_size: int, sampler: Sampler[int] | None = None, drop_last: bool = False
    ) -> DataLoader[Any]:
        """A loader of the batches that the model takes, not yet prepared.

        Args:
            dataset: the rows, with all of their columns.
            batch_size: rows of a batch.
            sampler: their order; None: as they are.
            drop_last: leave out a last batch with fewer rows.
        """
        args, signature = self.args, self._signature
        labels = {*signature.label_names, "labels", "label", "label_ids"}
        return DataLoader(
            drop_columns(dataset, signature.kept, labels),
            batch_size=batch_size,
            sampler=sampler,
            collate_fn=Collating(self.data_collator, signature.kept, signature.loss_of.count, labels),
            drop_last=drop_last,
            num_workers=args.dataloader_num_workers,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
        )

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
        self._events.tell("on_evaluate", metrics=found)
        return found

    def _evaluate_one(self, dataset: Data | str | None, ignored: list[str] | None, prefix: str) -> results.Metrics:
        with self._evaluator.session(self.model, self.optimizer) as session:
            loader = self._eval_loader(dataset)
            if overridden(type(self), ["evaluation_loop"]):
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

        It leaves no trace in the training (`trainer.evaluation` says what is put back). Streams are not tried, since
        that would read them, nor is an `evaluate` or `evaluation_loop` of a subclass. `eval_sanity_check=False` switches it off.
        Nothing is tried while `headway estimate --script` forecasts, where tensors have no values.

        Raises:
            MetricError: `compute_metrics` raises.
            ConfigError: `metric_for_best_model` is not among the metrics.
        """
        args = self.args
        if is_forecast() or not args.eval_sanity_check or (args.eval_strategy == "no" and not args.eval_on_start):
            return
        if not overridden(type(self), ["evaluate", "evaluation_loop"]):
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
        self._events.tell("on_predict", metrics=found)
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
