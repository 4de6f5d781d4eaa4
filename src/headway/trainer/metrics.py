"""What `compute_metrics` may be, batch by batch: what is kept does not grow with the samples, unless a metric needs them all."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy
import torch

from headway.common.text import format_bytes
from headway.errors import ConfigError, MetricError
from headway.log import get_logger
from headway.runtime.collectives.tree import Tree, tensors
from headway.trainer.data import IGNORED
from headway.trainer.results import EvalPrediction, Metrics

log = get_logger(__name__)

_LARGE = 1 << 30


class StreamingMetric(Protocol):
    """A metric that takes batches as they come, so that nothing else is kept. torchmetrics' objects are such.

    Every rank is given the rows of all ranks, in the data's order and each once. `reset()` is called before an evaluation
    where it exists.
    """

    def update(self, predictions: Tree, labels: Tree) -> Any:
        """Take the rows of one batch of all ranks: tensors on the device, or tuples of them."""

    def compute(self) -> Any:
        """A dict of numbers by name, or one number."""


class Accumulated:
    """All predictions and labels, in host memory; what `compute_metrics(EvalPrediction)` and `predict` need.

    Args:
        function: called with everything at the end; None: only collect.
        num_rows: how many there will be, as far as it is known.
    """

    def __init__(self, function: Callable[[EvalPrediction], Mapping[str, Any]] | None, num_rows: int | None) -> None:
        self.function = function
        self.num_rows = num_rows
        self._predictions: list[Tree] = []
        self._labels: list[Tree] = []

    def update(self, predictions: Tree, labels: Tree) -> None:
        """Keep a batch."""
        if not self._predictions:
            self._warn(predictions)
        self._predictions.append(_to_host(predictions))
        self._labels.append(_to_host(labels))

    def _warn(self, predictions: Tree) -> None:
        found = [tensor for tensor in tensors(predictions) if tensor.ndim]
        if self.function is None or not self.num_rows or not found:
            return
        expected = sum(tensor[:1].numel() * tensor.element_size() for tensor in found) * self.num_rows
        if expected > _LARGE:
            log.warning_once(
                "compute_metrics is given all predictions at once: about %s of host memory on each process. Make them smaller first "
                "(preprocess_logits_for_metrics), or take batches as they come: an object with update(predictions, labels) and "
                "compute() in place of the function",
                format_bytes(expected),
            )

    def everything(self) -> EvalPrediction:
        """As arrays."""
        return EvalPrediction(_join(self._predictions), _join(self._labels))

    def compute(self) -> Mapping[str, Any]:
        """What the function makes of everything."""
        return {} if self.function is None else self.function(self.everything())


class Batchwise:
    """`compute_metrics(prediction, compute_result)` called for each batch; its last answer counts.

    Args:
        function: the user's.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._held: EvalPrediction | None = None

    def update(self, predictions: Tree, labels: Tree) -> None:
        """Hand over the batch before this one: which is the last is not known before the end."""
        if self._held is not None:
            self.function(self._held, compute_result=False)
        self._held = EvalPrediction(_join([_to_host(predictions)]), _join([_to_host(labels)]))

    def compute(self) -> Any:
        """Hand over the last one."""
        return {} if self._held is None else self.function(self._held, compute_result=True)


def as_metric(given: Any, is_batchwise: bool, num_rows: int | None) -> StreamingMetric | None:
    """What `compute_metrics` means: a function, or a streaming metric.

    Raises:
        ConfigError: it is neither.
    """
    if given is None:
        return None
    if callable(getattr(given, "update", None)) and callable(getattr(given, "compute", None)):
        reset = getattr(given, "reset", None)
        if callable(reset):
            reset()
        return given  # type: ignore[no-any-return]
    if not callable(given):
        raise ConfigError(
            f"compute_metrics is a {type(given).__name__}; give a function of an EvalPrediction, or an object with "
            "update(predictions, labels) and compute()"
        )
    return Batchwise(given) if is_batchwise else Accumulated(given, num_rows)


@dataclass(frozen=True)
class Measure:
    """What evaluations make of predictions.

    Attributes:
        compute: `compute_metrics`; None: only the loss is looked at.
        is_batchwise: it is called for each batch.
        preprocess: from (predictions, labels) to what is kept of the predictions, before anything travels; None: all.
        is_loss_only: predictions are not wanted.
    """

    compute: object
    is_batchwise: bool
    preprocess: Callable[[Tree, Tree], Tree] | None
    is_loss_only: bool

    @property
    def is_of_loss(self) -> bool:
        """Is only the loss looked at?"""
        return self.is_loss_only or self.compute is None

    def metric(self, num_rows: int | None) -> StreamingMetric | None:
        """What takes the batches of one evaluation; None: nothing does.

        Args:
            num_rows: how many there will be, as far as it is known.
        """
        return None if self.is_loss_only else as_metric(self.compute, self.is_batchwise, num_rows)

    def kept(self, predictions: Tree, labels: Tree) -> Tree:
        """What is kept of the predictions."""
        return predictions if predictions is None or self.preprocess is None else self.preprocess(predictions, labels)


def check_wanted(wanted: str, given: str, found: Metrics) -> None:
    """Is the metric to go by among those found, and a number?

    Args:
        wanted: as results call it.
        given: as the user does.
        found: the evaluation's metrics.

    Raises:
        ConfigError: it is not.
    """
    if wanted not in found:
        names = {name.removeprefix("eval_"): name for name in found}
        near = difflib.get_close_matches(wanted.removeprefix("eval_"), names, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ConfigError(
            f"metric_for_best_model={given!r} is not among the evaluation's metrics: {', '.join(sorted(found))}{hint}"
        )
    if isinstance(found[wanted], bool) or not isinstance(found[wanted], int | float):
        raise ConfigError(
            f"metric_for_best_model={given!r} is {found[wanted]!r}, which cannot be compared; name a metric that is a number"
        )


def named_metrics(found: Any, prefix: str) -> Metrics:
    """Numbers by name, with the prefix; one number alone is called "metric".

    Raises:
        MetricError: neither a dict nor a number.
    """
    if isinstance(found, int | float | numpy.number | numpy.ndarray | torch.Tensor):
        found = {"metric": found}
    if not isinstance(found, Mapping):
        raise MetricError(f"compute_metrics gave a {type(found).__name__}; give a dict of numbers by name")
    return {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": _number(v) for name, v in found.items()}


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor | numpy.ndarray | numpy.generic):
        return value.item() if getattr(value, "ndim", 0) == 0 or value.size == 1 else value.tolist()
    return value


def _to_host(values: Tree) -> Tree:
    if isinstance(values, torch.Tensor):
        return (values.float() if values.dtype == torch.bfloat16 else values).cpu()
    return tuple(map(_to_host, values)) if isinstance(values, tuple) else values


def _join(parts: list[Tree]) -> Tree:
    """Batches one below the other; rows of other lengths are filled with -100."""
    if not parts or parts[0] is None:
        return None
    if isinstance(parts[0], tuple):
        return tuple(_join(list(each)) for each in zip(*parts))
    if not isinstance(parts[0], torch.Tensor):
        return [row for part in parts for row in part]
    if parts[0].ndim > 1 and len({part.shape[1] for part in parts}) > 1:
        width = max(part.shape[1] for part in parts)
        parts = [_widened(part, width) for part in parts]
    return torch.cat(parts).numpy()


def _widened(part: torch.Tensor, width: int) -> torch.Tensor:
    made = part.new_full((part.shape[0], width, *part.shape[2:]), IGNORED)
    made[:, : part.shape[1]] = part
    return made
