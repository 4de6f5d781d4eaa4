"""Metrics of an evaluation that are computed batch by batch.

The required memory does not grow with the number of samples, unless a metric needs all of them at once.
"""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy
import torch

from headway.common.text import format_bytes
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.collectives.tree import Tree, list_tensors
from headway.errors import ConfigError, MetricError
from headway.log import get_logger
from headway.trainer.collation import IGNORED
from headway.trainer.results import EvalPrediction, Metrics

log = get_logger(__name__)

_WARNING_BYTES = 1 << 30
"""Size of all predictions above which a warning is logged."""

_TOLERANCE = 1e-6
"""Relative difference up to which the ranks' metrics count as equal. Different devices can round a value differently."""


class StreamingMetric(Protocol):
    """Interface of a metric that is updated batch by batch, so that predictions need not be kept.

    The metric objects of torchmetrics implement it. On every rank, the metric receives the rows of all ranks, each row
    once and in the order of the dataset. `reset()`, if it exists, is called before an evaluation.
    """

    def update(self, predictions: Tree, labels: Tree) -> Any:
        """Process the predictions and labels of one batch of all ranks: tensors on the device, or tuples of tensors.

        Labels are None if the data has none, and predictions are None if the model returns none.
        """

    def compute(self) -> Any:
        """Return the metrics as a dict of numbers by name, or as a single number."""


class AccumulatedMetric:
    """Streaming metric that collects all predictions and labels in host memory, for `compute_metrics` and `predict`.

    Args:
        function: Function that is called at the end with an `EvalPrediction` of all predictions and labels. None: only
            collect them.
        num_rows: Expected number of rows, or None if unknown.
    """

    def __init__(self, function: Callable[[EvalPrediction], Mapping[str, Any]] | None, num_rows: int | None) -> None:
        self.function = function
        self.num_rows = num_rows
        self._predictions: list[Tree] = []
        self._labels: list[Tree] = []

    def update(self, predictions: Tree, labels: Tree) -> None:
        """Store the predictions and labels of a batch in host memory."""
        if not self._predictions:
            self._warn_of_size(predictions)
        self._predictions.append(_to_host(predictions))
        self._labels.append(_to_host(labels))

    def _warn_of_size(self, predictions: Tree) -> None:
        """Warn once if all predictions for the metric function will be large, judging by those of the first batch."""
        tensors = [tensor for tensor in list_tensors(predictions) if tensor.ndim]
        if self.function is None or not self.num_rows or not tensors:
            return
        bytes_per_row = sum(tensor[:1].numel() * tensor.element_size() for tensor in tensors)
        expected_bytes = bytes_per_row * self.num_rows
        if expected_bytes > _WARNING_BYTES:
            log.warning_once(
                "compute_metrics is given all predictions at once: about %s of host memory on each process. Make them smaller first "
                "(preprocess_logits_for_metrics), or take batches as they come: an object with update(predictions, labels) and "
                "compute() in place of the function",
                format_bytes(expected_bytes),
            )

    def join_all(self) -> EvalPrediction:
        """Return all predictions and labels collected so far, as arrays."""
        return EvalPrediction(_join_batches(self._predictions), _join_batches(self._labels))

    def compute(self) -> Mapping[str, Any]:
        """Return the result of the metric function for all predictions; {} if there is no such function."""
        return {} if self.function is None else self.function(self.join_all())


class BatchwiseMetric:
    """Streaming metric that calls a function `compute_metrics(prediction, compute_result)` for each batch.

    `compute_result` is True for the last batch. The function then returns the metrics.

    Args:
        function: The user's function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._last_batch: EvalPrediction | None = None

    def update(self, predictions: Tree, labels: Tree) -> None:
        """Store a batch, and pass the previous batch to the function.

        A batch is passed one call later, because the last batch must be passed with `compute_result=True`.
        """
        if self._last_batch is not None:
            self.function(self._last_batch, compute_result=False)
        self._last_batch = EvalPrediction(_join_batches([_to_host(predictions)]), _join_batches([_to_host(labels)]))

    def compute(self) -> Any:
        """Call the function with the last batch and `compute_result=True`, and return the metrics.

        Return {} if there was no batch.
        """
        return {} if self._last_batch is None else self.function(self._last_batch, compute_result=True)


def make_metric(compute_metrics: Any, is_batchwise: bool, num_rows: int | None) -> StreamingMetric | None:
    """Return a streaming metric for a Trainer's `compute_metrics`, or None if that is None.

    An object that is a streaming metric already, with `update` and `compute`, is returned itself. Its `reset` is called
    first, if it has one.

    Args:
        compute_metrics: Value of `compute_metrics`: a function, a streaming metric, or None.
        is_batchwise: Whether a function is called for each batch. If False, it is called once, at the end.
        num_rows: Expected number of rows, or None if unknown.

    Raises:
        ConfigError: If `compute_metrics` is neither a function nor a streaming metric.
    """
    if compute_metrics is None:
        return None
    if callable(getattr(compute_metrics, "update", None)) and callable(getattr(compute_metrics, "compute", None)):
        reset = getattr(compute_metrics, "reset", None)
        if callable(reset):
            reset()
        return compute_metrics  # type: ignore[no-any-return]
    if not callable(compute_metrics):
        raise ConfigError(
            f"compute_metrics is a {type(compute_metrics).__name__}; give a function of an EvalPrediction, or an object with "
            "update(predictions, labels) and compute()"
        )
    return BatchwiseMetric(compute_metrics) if is_batchwise else AccumulatedMetric(compute_metrics, num_rows)


@dataclass(frozen=True)
class MetricSettings:
    """Settings that determine what an evaluation computes from predictions.

    Attributes:
        compute: `compute_metrics` of the Trainer. None: only the loss is computed.
        is_batchwise: Whether `compute` is called for each batch.
        preprocess: Function of (predictions, labels) that returns the part of the predictions to keep. It is called
            before ranks exchange the predictions. None: keep all.
        is_loss_only: Whether only the loss is requested.
    """

    compute: object
    is_batchwise: bool
    preprocess: Callable[[Tree, Tree], Tree] | None
    is_loss_only: bool

    @property
    def can_skip_predictions(self) -> bool:
        """Whether an evaluation computes only the loss and needs no predictions."""
        return self.is_loss_only or self.compute is None

    def make_metric(self, num_rows: int | None) -> StreamingMetric | None:
        """Return the metric for one evaluation; None if only the loss is computed.

        Args:
            num_rows: Expected number of rows, or None if unknown.

        Raises:
            ConfigError: If `compute` is neither a function nor a streaming metric.
        """
        return None if self.is_loss_only else make_metric(self.compute, self.is_batchwise, num_rows)

    def select_predictions(self, predictions: Tree, labels: Tree) -> Tree:
        """Return the part of the predictions to keep, as selected by `preprocess`; all of them if it is None."""
        return predictions if predictions is None or self.preprocess is None else self.preprocess(predictions, labels)


def check_best_metric(name: str, user_name: str, metrics: Metrics) -> None:
    """Raise an error if the metric for the best model is missing or not a number.

    Args:
        name: Name of the metric in the results.
        user_name: Name of the metric as the user wrote it.
        metrics: Metrics of the evaluation.

    Raises:
        ConfigError: If the metric is missing or not a number.
    """
    if name not in metrics:
        short_names = [each.removeprefix("eval_") for each in metrics]
        similar = difflib.get_close_matches(name.removeprefix("eval_"), short_names, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(map(repr, similar))}?" if similar else ""
        raise ConfigError(
            f"metric_for_best_model={user_name!r} is not among the evaluation's metrics: {', '.join(sorted(metrics))}{hint}"
        )
    if isinstance(metrics[name], bool) or not isinstance(metrics[name], int | float):
        raise ConfigError(
            f"metric_for_best_model={user_name!r} is {metrics[name]!r}, which cannot be compared; name a metric that is a number"
        )


def make_named_metrics(result: Any, prefix: str) -> Metrics:
    """Return metrics as a dict in which all names have the prefix. A single number gets the name "metric".

    Names that already have the prefix are kept. Arrays and tensors become Python numbers or lists.

    Args:
        result: Result of a metric: a dict, a number, an array or a tensor.
        prefix: Prefix of the names, without the underscore that follows it.

    Raises:
        MetricError: If the result is none of these.
    """
    if isinstance(result, int | float | numpy.number | numpy.ndarray | torch.Tensor):
        result = {"metric": result}
    if not isinstance(result, Mapping):
        raise MetricError(f"compute_metrics gave a {type(result).__name__}; give a dict of numbers by name")
    named: Metrics = {}
    for name, value in result.items():
        named[name if name.startswith(f"{prefix}_") else f"{prefix}_{name}"] = _to_number(value)
    return named


def share_metrics(collectives: Collectives, metrics: Metrics) -> Metrics:
    """Return this rank's metrics with the numbers of rank 0, so that all ranks make the same decisions.

    Every rank must call it. If the ranks' numbers differ, it logs one warning.

    `compute_metrics` runs on every rank, and its results can differ, for example if it draws random samples. The ranks
    would then load different checkpoints as the best one, or stop after different updates.

    Args:
        collectives: Collectives over all ranks.
        metrics: Metrics of this rank by name.
    """
    if collectives.world_size == 1:
        return metrics
    numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    everyone = collectives.gather_objects(numbers)
    for others in everyone[1:]:
        for name in sorted(everyone[0].keys() & others.keys()):
            first, other = float(everyone[0][name]), float(others[name])
            if not (math.isclose(first, other, rel_tol=_TOLERANCE) or str(first) == str(other)):
                log.warning_once(
                    "the metric %s differs between ranks; all ranks use the value of rank 0. Let compute_metrics return the "
                    "same on every rank, for example by seeding what it draws",
                    name,
                )
    shared: Metrics = everyone[0]
    return metrics | shared


def _to_number(value: Any) -> Any:
    """Return a tensor or array with one element as a number, and one with several as a list. Other values are kept."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, numpy.ndarray | numpy.generic):
        return value.item() if value.size == 1 else value.tolist()
    return value


def _to_host(values: Tree) -> Tree:
    """Copy the tensors in a tuple, or a single tensor, to host memory. bf16, which NumPy lacks, becomes float32."""
    if isinstance(values, torch.Tensor):
        return (values.float() if values.dtype == torch.bfloat16 else values).cpu()
    return tuple(map(_to_host, values)) if isinstance(values, tuple) else values


def _join_batches(parts: list[Tree]) -> Tree:
    """Concatenate the values of several batches, and return them as NumPy arrays, or tuples of arrays.

    Rows of different lengths are padded with -100. Lists become one list of rows. Return None if there are no values.

    Raises:
        MetricError: If rows of different lengths have a dtype without -100.
    """
    if not parts or parts[0] is None:
        return None
    if isinstance(parts[0], tuple):
        return tuple(_join_batches(list(each)) for each in zip(*parts))
    if not isinstance(parts[0], torch.Tensor):
        return [row for part in parts for row in part]
    if parts[0].ndim > 1 and len({part.shape[1] for part in parts}) > 1:
        width = max(part.shape[1] for part in parts)
        parts = [_pad_width(part, width) for part in parts]
    return torch.cat(parts).numpy()


def check_padding(dtype: torch.dtype) -> None:
    """Raise an error if rows of different lengths cannot be padded with -100, because a dtype has no such value.

    Raises:
        MetricError: If the dtype is bool or unsigned.
    """
    if not dtype.is_signed:
        raise MetricError(
            f"predictions or labels of {dtype} have rows of different lengths, which are padded with {IGNORED}, and {dtype} has no "
            "such value; convert them to integers, for example in preprocess_logits_for_metrics"
        )


def _pad_width(part: torch.Tensor, width: int) -> torch.Tensor:
    """Return a tensor whose dimension 1 is padded with the ignored label (-100) to `width`."""
    check_padding(part.dtype)
    padded = part.new_full((part.shape[0], width, *part.shape[2:]), IGNORED)
    padded[:, : part.shape[1]] = part
    return padded
