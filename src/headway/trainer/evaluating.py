"""The half of the Trainer that evaluates and predicts."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from headway.data.loader import PreparedLoader
from headway.errors import MetricError
from headway.ops.tree import to_device
from headway.runtime.streams import read_streams, write_streams
from headway.trainer.building import Building
from headway.trainer.evaluate import Accumulated, Evaluation, as_metric, named_metrics, per_sample
from headway.trainer.loss import call, loss_among, without_loss
from headway.trainer.rehearsal import Rehearsal, check_wanted, first_failure, left_as_it_was, merged
from headway.trainer.results import EvalLoopOutput, PredictionOutput, speed


class Evaluating(Building):
    """Evaluation and prediction, in a training or by itself."""

    compute_metrics: Any
    preprocess_logits_for_metrics: Any
    is_in_train: bool
    _eval_loaders: dict[str, PreparedLoader]
    _num_rows_in_hand: int | None = None
    _loader_in_hand: PreparedLoader | None = None
    _is_evaluating = False

    # ---------------------------------------------------------------- evaluate

    def evaluate(self, eval_dataset: Any = None, ignore_keys: list[str] | None = None,
                 metric_key_prefix: str = "eval") -> dict[str, Any]:  # fmt: skip
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
            found: dict[str, Any] = {}
            for name, dataset in several.items():
                chosen = name if eval_dataset is None else dataset
                found.update(self._evaluate_one(chosen, ignore_keys, f"{metric_key_prefix}_{name}"))
        else:
            found = self._evaluate_one(eval_dataset, ignore_keys, metric_key_prefix)
        self.tell("on_evaluate", metrics=found)
        return found

    def _evaluate_one(self, dataset: Any, ignored: list[str] | None, prefix: str) -> dict[str, Any]:
        with self._evaluating() as model:
            loader = self._eval_loader(dataset)
            if self._overrides("evaluation_loop"):
                found = dict(self.evaluation_loop(loader, "Evaluation", None, ignored, prefix).metrics)
            else:
                metric = None
                if not self.args.prediction_loss_only:
                    metric = as_metric(self.compute_metrics, self.args.batch_eval_metrics, _num_rows(loader))
                found, _ = self._pass(model, loader, metric, ignored, prefix)
        self.log(found)
        return found

    def evaluation_loop(self, dataloader: Any, description: str = "Evaluation", prediction_loss_only: bool | None = None,
                        ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval") -> EvalLoopOutput:  # fmt: skip
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
        is_loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        with self._evaluating() as model:
            loader = self._prepared(dataloader)
            everything = None if is_loss_only else Accumulated(None, _num_rows(loader))
            found, num_samples = self._pass(model, loader, everything, ignore_keys, metric_key_prefix)
        if everything is None:
            return EvalLoopOutput(None, None, found, num_samples)
        predictions, labels = everything.everything()
        if labels is not None and self.compute_metrics is not None:
            metric = as_metric(self.compute_metrics, self.args.batch_eval_metrics, None)
            assert metric is not None
            metric.update(*_as_tensors((predictions, labels)))
            found.update(named_metrics(metric.compute(), metric_key_prefix))
        return EvalLoopOutput(predictions, labels, found, num_samples)

    def prediction_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """The old name of `evaluation_loop`."""
        return self.evaluation_loop(*args, **kwargs)

    def _overrides(self, name: str) -> bool:
        """Has a subclass a method of its own by this name?"""
        return getattr(type(self), name) is not getattr(Evaluating, name)

    def _pass(self, model: torch.nn.Module, loader: PreparedLoader, metric: Any, ignored: list[str] | None,
              prefix: str) -> tuple[dict[str, Any], int]:  # fmt: skip
        """Go through the loader once; returns the metrics, and the number of rows."""
        began, loss_only = time.monotonic(), metric is None
        evaluation = Evaluation(
            self.accelerator, loader, lambda batch: self.prediction_step(model, batch, loss_only, ignored),
            self.preprocess_logits_for_metrics,
        )  # fmt: skip
        for predictions, labels in evaluation.batches():
            if metric is not None:
                metric.update(predictions, labels)
            self.tell("on_prediction_step", eval_dataloader=loader)
        found: dict[str, Any] = {}
        loss = evaluation.mean_loss()
        if loss is not None:
            found[f"{prefix}_loss"] = loss
        if metric is not None:
            found.update(named_metrics(metric.compute(), prefix))
        found.update(speed(prefix, time.monotonic() - began, evaluation.num_samples, evaluation.num_batches))
        return found, evaluation.num_samples

    # ---------------------------------------------------------------- before the training

    def check_evaluation(self) -> None:
        """Try the evaluation on a few rows before the first update; `train` calls it where evaluations are to come.

        It leaves no trace in the training. Streams are not tried, since that would read them, nor is an `evaluate` or
        `evaluation_loop` of a subclass.

        Raises:
            MetricError: `compute_metrics` raises.
            ConfigError: `metric_for_best_model` is not among the metrics.
        """
        args = self.args
        if (args.eval_strategy == "no" and not args.eval_on_start) or any(
            map(self._overrides, ("evaluate", "evaluation_loop"))
        ):
            return
        hardware = self.accelerator.runtime.hardware
        streams, failure, error = read_streams(hardware), None, None
        try:
            with left_as_it_was(self.model):
                self._rehearse()
        except Exception as raised:
            failure, error = f"{type(raised).__name__}: {raised}", raised
        finally:
            self._loader_in_hand = self._num_rows_in_hand = None
            write_streams(streams, hardware)
        told = first_failure(self.accelerator.collectives.gather_objects(failure))
        if error is not None:
            raise error
        if told is not None:
            raise MetricError(f"the evaluation failed on another rank: {told}")

    def _rehearse(self) -> None:
        args = self.args
        compute = None if args.prediction_loss_only else self.compute_metrics
        keys = list(self.eval_dataset) if isinstance(self.eval_dataset, dict) else [None]

        def predict(batch: Any, num_rows: int) -> tuple[torch.Tensor | None, Any, Any]:
            self._num_rows_in_hand = num_rows
            loss, predictions, labels = self.prediction_step(self.model, batch, compute is None)
            if predictions is not None and self.preprocess_logits_for_metrics is not None:
                predictions = self.preprocess_logits_for_metrics(predictions, labels)
            return loss, predictions, labels

        wanted = args.wanted_metric
        found, is_all = merged(
            Rehearsal(
                self._eval_loader(key), lambda batch: to_device(batch, self.accelerator.device), predict, compute,
                args.batch_eval_metrics, "eval" if key is None else f"eval_{key}",
            ).run(wanted if key is None or (wanted or "").startswith(f"eval_{key}_") else None)
            for key in keys
        )  # fmt: skip
        if wanted is not None and (is_all or wanted in found):
            check_wanted(wanted, args.metric_for_best_model or wanted, found)

    def prediction_step(self, model: torch.nn.Module, inputs: Any, prediction_loss_only: bool,
                        ignore_keys: list[str] | None = None) -> tuple[torch.Tensor | None, Any, Any]:  # fmt: skip
        """(loss, predictions, labels) of one batch, under no_grad; what is not there is None.

        Args:
            model: in evaluation mode.
            inputs: the batch, on the device.
            prediction_loss_only: leave predictions and labels out.
            ignore_keys: outputs that are not predictions; None: what the model's config says.
        """
        inputs = self._prepare_inputs(inputs)
        bare, labels = self._loss_of.split(inputs)
        with self.accelerator.autocast():
            if labels is not None:
                loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
            else:
                outputs = call(model, bare)
                loss = loss_among(outputs) if self._loss_of.function is None else None
        if prediction_loss_only:
            return loss, None, None
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            ignore_keys = list(getattr(config, "keys_to_ignore_at_inference", None) or ())
        has_loss = loss is not None and self._loss_of.function is None
        num_rows = self._num_rows_in_hand
        if self._loader_in_hand is not None and num_rows is None:
            num_rows = self._loader_in_hand.num_rows
        predictions = per_sample(without_loss(outputs, has_loss, ignore_keys), num_rows)
        return loss, predictions, per_sample(labels, num_rows)

    def compute_loss(self, model: torch.nn.Module, inputs: Any, return_outputs: bool = False,
                     num_items_in_batch: int | None = None) -> Any:  # fmt: skip
        """The batch's loss, a mean; override it for one of your own.

        Args:
            model: prepared.
            inputs: the batch, on the device.
            return_outputs: return (loss, outputs).
            num_items_in_batch: how many labels of the batch count; None: the loss is a mean over samples.

        Raises:
            LossError: the model gives none.
        """
        loss, outputs = self._loss_of(model, inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    # ---------------------------------------------------------------- predict

    def predict(self, test_dataset: Any, ignore_keys: list[str] | None = None,
                metric_key_prefix: str = "test") -> PredictionOutput:  # fmt: skip
        """Predictions for a dataset, as arrays in its order; every rank gets all of them.

        They lie in host memory together; `iterate_predictions` gives them batch by batch.

        Args:
            test_dataset: with labels or without.
            ignore_keys: outputs of the model that are not predictions.
            metric_key_prefix: what the metrics' names begin with.
        """
        with self._evaluating():
            loader = self._prepared(self.get_test_dataloader(test_dataset))
            predictions, labels, found, _ = self.evaluation_loop(
                loader, "Prediction", False, ignore_keys, metric_key_prefix
            )
        self.tell("on_predict", metrics=found)
        return PredictionOutput(predictions, labels, found)

    def iterate_predictions(self, test_dataset: Any, ignore_keys: list[str] | None = None) -> Iterator[tuple[Any, Any]]:
        """(predictions, labels) batch by batch, on the device, of all ranks; every rank goes through all of it.

        Args:
            test_dataset: with labels or without.
            ignore_keys: outputs of the model that are not predictions.
        """
        with self._evaluating() as model:
            loader = self._prepared(self.get_test_dataloader(test_dataset))
            yield from Evaluation(
                self.accelerator, loader, lambda batch: self.prediction_step(model, batch, False, ignore_keys),
                self.preprocess_logits_for_metrics,
            ).batches()  # fmt: skip

    # ---------------------------------------------------------------- the model, as evaluations need it

    @contextmanager
    def _evaluating(self) -> Iterator[torch.nn.Module]:
        """The model in evaluation mode without gradients; afterwards all is as it was."""
        if self._is_evaluating:
            yield self.model
            return
        self._is_evaluating = True
        model, was_training = self.model, self.model.training
        optimizers = [each for each in (self.optimizer,) if hasattr(each, "eval")]
        if not self.is_in_train:
            model = self.accelerator.prepare_model(self.model, evaluation_mode=True)
        model.eval()
        for optimizer in optimizers:
            optimizer.eval()
        try:
            with torch.no_grad(), self.phase("evaluation"):
                yield model
        finally:
            self._loader_in_hand, self._is_evaluating = None, False
            model.train(was_training)
            for optimizer in optimizers:
                optimizer.train()
            if not self.is_in_train:
                self.accelerator.free_memory()

    def _eval_loader(self, dataset: Any) -> PreparedLoader:
        """Of the Trainer's own data, prepared once in a training; of other data each time."""
        key = "" if dataset is None else dataset
        if not isinstance(key, str) or not self.is_in_train:
            return self._prepared(self.get_eval_dataloader(dataset))
        if key not in self._eval_loaders:
            self._eval_loaders[key] = self._prepared(self.get_eval_dataloader(dataset))
        self._loader_in_hand = self._eval_loaders[key]
        return self._eval_loaders[key]

    def _prepared(self, loader: Any) -> PreparedLoader:
        self._loader_in_hand = self.accelerator.prepare_data_loader(loader)
        return self._loader_in_hand


def _num_rows(loader: PreparedLoader) -> int | None:
    try:
        return loader.total_dataset_length
    except TypeError:
        return None


def _as_tensors(values: Any) -> Any:
    if isinstance(values, tuple):
        return tuple(map(_as_tensors, values))
    return None if values is None else torch.as_tensor(values)
