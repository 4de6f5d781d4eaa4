"""Sanity check of the evaluation before the first update, so that errors in it occur early.

The check runs a few rows, spread over the evaluation data, through the model and `compute_metrics`. An error that would
otherwise occur after the first epoch then occurs at once. Some metrics raise errors if there are only few rows (an area
under the curve with only one class), or have names that depend on the data (a score per class). So if a metric raises an
error, or does not return the requested name, it is tried on up to 32 batches before the check fails.

The check restores the modes and buffers of modules and the global RNG states. It does not affect loaders, callbacks,
logs, files or the optimizer. A metric object is copied. One that cannot be copied is used itself if it has `reset`, and
is otherwise left out of the check. Side effects of the user's own code (dataset, collate function, `compute_loss`,
`prediction_step`, a metric function) cannot be undone. `TrainingArguments(eval_sanity_check=False)` skips the check.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset

from headway.accelerator import Accelerator
from headway.core.data.loader import PreparedLoader
from headway.core.runtime.collectives.tree import to_device
from headway.core.runtime.seed import read_rng_states, write_rng_states
from headway.core.training.evaluation_mode import use_evaluation_mode
from headway.errors import MetricError
from headway.log import get_logger
from headway.trainer.arguments import TrainingArguments
from headway.trainer.data import Batch, get_length
from headway.trainer.evaluation import SPEED_NAMES, Evaluator, PredictionMethods
from headway.trainer.loss import split_label_count
from headway.trainer.metrics import MetricSettings, check_best_metric, make_named_metrics
from headway.trainer.results import Metrics

log = get_logger(__name__)
MAX_BATCHES = 32
"""Largest number of batches on which a metric is tried before the check fails."""
_DATA_INDEPENDENT_ERRORS = (NameError, ImportError)
"""Errors that a metric raises on any data, so that it need not be tried on more batches."""


@dataclass(frozen=True)
class EvaluationSanityCheck:
    """Trial of a training run's evaluations on a few rows.

    Attributes:
        args: Training arguments, which name the metric for the best model.
        accelerator: Accelerator whose ranks take part.
        model: Prepared model.
        evaluator: Evaluator, which gets the number of rows of each batch from the check.
        methods: Trainer, whose methods a subclass may override.
        metric_settings: Metric, and settings that select the predictions to keep.
        shared: Objects that a metric may refer to and that are not copied with it. The model is not copied either.
    """

    args: TrainingArguments
    accelerator: Accelerator
    model: torch.nn.Module
    evaluator: Evaluator
    methods: PredictionMethods
    metric_settings: MetricSettings
    shared: Sequence[object]

    def run(self, loaders: dict[str, PreparedLoader]) -> None:
        """Evaluate a few batches, to check `compute_metrics` and `metric_for_best_model` before the training.

        Every rank must call this method. If the check fails on one rank, it fails on all.

        Args:
            loaders: Mapping from the prefix of each evaluation's metrics to its prepared loader. The state of the
                loaders does not change.

        Raises:
            MetricError: If `compute_metrics` raises, or returns neither a dict nor a number. Also if the check failed,
                for any reason, on another rank only.
            ConfigError: If `metric_for_best_model` is not among the metrics or not a number, or if `compute_metrics` is
                neither a function nor a streaming metric.
        """
        hardware = self.accelerator.runtime.hardware
        rng_states = read_rng_states(hardware)
        error: Exception | None = None
        try:
            with _use_temporary_evaluation_mode(self.model):
                self._check_all(loaders)
        except Exception as raised:
            error = raised
        finally:
            write_rng_states(rng_states, hardware)
        own_failure = None if error is None else f"{type(error).__name__}: {error}"
        failures = [text for text in self.accelerator.collectives.gather_objects(own_failure) if text is not None]
        if error is not None:
            raise error
        if failures:
            raise MetricError(f"the evaluation failed on another rank: {failures[0]}")

    def _check_all(self, loaders: dict[str, PreparedLoader]) -> None:
        """Try all evaluations, and check that one of them returns the metric for the best model.

        If an evaluation could not be tried, a missing metric is no error.
        """
        best_metric = self.args.wanted_metric
        all_metrics: Metrics = {}
        is_complete = True
        for prefix, loader in loaders.items():
            is_expected_here = prefix == "eval" or (best_metric or "").startswith(f"{prefix}_")
            metrics = self._check_one(loader, prefix, best_metric if is_expected_here else None)
            all_metrics |= metrics or {}
            is_complete = is_complete and metrics is not None
        if best_metric is not None and (is_complete or best_metric in all_metrics):
            check_best_metric(best_metric, self.args.metric_for_best_model or best_metric, all_metrics)

    def _check_one(self, loader: PreparedLoader, prefix: str, best_metric: str | None) -> Metrics | None:
        """Run one evaluation on a few rows and return its metrics.

        Return None if the loader cannot be read without side effects, or if the metric cannot be tried. If the metric
        raises an error or does not return the name `best_metric`, up to 32 batches are tried. A NameError or ImportError is
        reported at once, because it does not depend on the data.

        Args:
            loader: Prepared loader of the evaluation.
            prefix: Prefix of the metrics' names.
            best_metric: Name of the metric for the best model, if this evaluation should compute it, else None.
        """
        try:
            metrics = self._run_batches(loader, prefix, 1)
            is_found = metrics is None or best_metric is None or best_metric in metrics
            if is_found or self.metric_settings.can_skip_predictions:
                return metrics
        except MetricError as error:
            if isinstance(error.__cause__, _DATA_INDEPENDENT_ERRORS):
                raise
        return self._run_batches(loader, prefix, MAX_BATCHES)

    def _run_batches(self, loader: PreparedLoader, prefix: str, num_batches: int) -> Metrics | None:
        """Evaluate a few batches, and return the metrics. Losses and speeds are 0, because only their names are needed.

        Return None if the loader cannot be read without side effects, or if the metric cannot be tried.

        Args:
            loader: Prepared loader of the evaluation data.
            prefix: Prefix of the names of the metrics, such as "eval".
            num_batches: Largest number of batches.
        """
        batches = _read_rows(loader, num_batches)
        if batches is None:
            return None
        metric_settings, is_complete = self._copy_metric_settings()
        metric = metric_settings.make_metric(None)
        metrics: Metrics = dict.fromkeys((f"{prefix}_{name}" for name in SPEED_NAMES), 0.0)
        num_rows = 0
        for batch, rows in batches:
            num_rows += rows
            inputs, _ = split_label_count(to_device(batch, self.accelerator.device))
            with self.evaluator.use_num_rows(self.model, rows):
                loss, predictions, labels = self.methods.prediction_step(self.model, inputs, metric is None)
            predictions = metric_settings.select_predictions(predictions, labels)
            if loss is not None:
                metrics[f"{prefix}_loss"] = 0.0
            if metric is not None:
                with _convert_errors(num_rows):
                    metric.update(predictions, labels)
        if metric is not None:
            with _convert_errors(num_rows):
                metrics |= make_named_metrics(metric.compute(), prefix)
        return metrics if is_complete else None

    def _copy_metric_settings(self) -> tuple[MetricSettings, bool]:
        """Return the evaluation's settings with a copy of the metric, and whether the check includes the metric.

        A metric that cannot be copied is used itself if it has `reset`. Otherwise the check computes only the loss.
        """
        metric_settings = self.metric_settings
        try:
            shared = [*self.shared, *self.model.modules(), *self.model.parameters(), *self.model.buffers()]
            return replace(metric_settings, compute=_copy_metric(metric_settings.compute, shared)), True
        except Exception as error:  # whatever the user's object raises
            if callable(getattr(metric_settings.compute, "reset", None)):  # each evaluation resets it first
                return metric_settings, True
            log.info("compute_metrics cannot be copied (%s), so the evaluation is checked without it", error)
            return replace(metric_settings, is_loss_only=True), False


def _read_rows(loader: PreparedLoader, num_batches: int) -> Iterator[tuple[Batch, int]] | None:
    """Return an iterator over pairs of (batch, number of rows), read directly from the dataset of a loader.

    The loader itself is not iterated over. Return None if its dataset is iterable, empty or without a length, or if it
    has a custom batch sampler.

    Args:
        loader: Prepared loader.
        num_batches: Maximum number of batches. Their rows are spread over the whole dataset.
    """
    dataset, sampler = loader.dataset, loader.batch_sampler
    num_rows = None if isinstance(dataset, IterableDataset) else get_length(dataset)
    if not num_rows or type(sampler) is not BatchSampler:
        return None
    batches = spread_rows(num_rows, sampler.batch_size, num_batches)
    return ((loader.collate_fn([dataset[index] for index in batch]), len(batch)) for batch in batches)


def spread_rows(num_rows: int, batch_size: int, num_batches: int) -> list[list[int]]:
    """Return the row numbers of `num_batches` batches, each of which is spread over the whole dataset.

    A short dataset results in fewer batches.

    Args:
        num_rows: Number of rows in the dataset.
        batch_size: Number of rows per batch.
        num_batches: Maximum number of batches.
    """
    num_used = min(num_rows, batch_size * num_batches)
    num_used_batches = max(1, math.ceil(num_used / batch_size))
    rows = [index * num_rows // num_used for index in range(num_used)]
    return [rows[offset::num_used_batches] for offset in range(num_used_batches)]


@contextmanager
def _convert_errors(num_rows: int) -> Iterator[None]:
    """Return a context manager that converts errors raised by the user's metric to a MetricError with advice.

    Args:
        num_rows: Number of rows on which the metric is tried.
    """
    try:
        yield
    except Exception as error:
        raise MetricError(
            f"compute_metrics raised {type(error).__name__}: {error}. It was tried on {num_rows} rows of the evaluation data "
            "before the training, not after its first epoch. Fix it, or skip this check: eval_sanity_check=False"
        ) from error


def _copy_metric(metric: Any, shared: Sequence[object]) -> Any:
    """Return a deep copy of a metric object. A function is returned unchanged.

    Args:
        metric: Metric object or function.
        shared: Objects to which the copy refers without copying them.
    """
    parameters = metric.parameters() if isinstance(metric, torch.nn.Module) else ()
    # deepcopy takes objects in its memo for copies that it has made.
    memo = {id(each): each for each in (*shared, *parameters)}
    return copy.deepcopy(metric, memo)


@contextmanager
def _use_temporary_evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Return a context manager that sets the model to evaluation mode and disables gradients.

    At its end, the modes and buffers of all modules are restored.
    """
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with use_evaluation_mode(model), torch.no_grad():
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
