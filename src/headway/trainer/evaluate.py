"""Evaluation and prediction, batch by batch: what is kept does not grow with the samples, unless a metric needs them all."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy
import torch

from headway.accelerator import Accelerator
from headway.data.loader import PreparedLoader
from headway.errors import ConfigError, MetricError
from headway.log import get_logger
from headway.ops.tree import Tree, tensors
from headway.trainer.collate import IGNORED
from headway.trainer.loss import take_count
from headway.trainer.results import EvalPrediction
from headway.units import format_bytes

log = get_logger(__name__)

_LARGE = 1 << 30

Step = Callable[[Any], tuple[torch.Tensor | None, Any, Any]]
"""From a batch to (loss, predictions, labels); what is not there is None."""


class StreamingMetric(Protocol):
    """A metric that takes batches as they come, so that nothing else is kept. torchmetrics' objects are such.

    Every rank is given the rows of all ranks, in the data's order and each once. `reset()` is called before an evaluation
    where it exists.
    """

    def update(self, predictions: Any, labels: Any) -> Any:
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
        self._predictions: list[Any] = []
        self._labels: list[Any] = []

    def update(self, predictions: Any, labels: Any) -> None:
        """Keep a batch."""
        if not self._predictions:
            self._warn(predictions)
        self._predictions.append(_to_host(predictions))
        self._labels.append(_to_host(labels))

    def _warn(self, predictions: Any) -> None:
        found = [tensor for tensor in tensors(predictions) if tensor.ndim]
        if self.function is None or not self.num_rows or not found:
            return
        expected = sum(tensor[:1].numel() * tensor.element_size() for tensor in found) * self.num_rows
        if expected > _LARGE:
            log.warning_once(
                "compute_metrics is given all predictions at once: about %s of host memory on each process. Make them smaller first "
                "(preprocess_logits_for_metrics), or take batches as they come: an object with update(predictions, labels) and "
                "compute() in place of the function", format_bytes(expected),
            )  # fmt: skip

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

    def update(self, predictions: Any, labels: Any) -> None:
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


class Evaluation:
    """One pass over a loader.

    Args:
        accelerator: whose ranks share the data.
        loader: the prepared loader.
        step: what is done with each batch.
        preprocess: from (predictions, labels) to what is kept of the predictions; before anything travels.

    Attributes:
        num_samples: rows of all ranks so far.
        num_batches: batches of this rank so far.
    """

    def __init__(self, accelerator: Accelerator, loader: PreparedLoader, step: Step,
                 preprocess: Callable[[Any, Any], Any] | None = None) -> None:  # fmt: skip
        self.num_samples = 0
        self.num_batches = 0
        self._accelerator = accelerator
        self._loader = loader
        self._step = step
        self._preprocess = preprocess
        self._loss: torch.Tensor | None = None
        self._weight = 0.0

    def batches(self) -> Iterator[tuple[Any, Any]]:
        """(predictions, labels) of all ranks, batch by batch; what is not there is None."""
        for batch in self._loader:
            batch, num_items = take_count(batch)
            loss, predictions, labels = self._step(batch)
            self._count(loss, num_items)
            if predictions is not None and self._preprocess is not None:
                predictions = self._preprocess(predictions, labels)
            yield self._gather(predictions), self._gather(labels)

    def _count(self, loss: torch.Tensor | None, num_items: int | None) -> None:
        counts = self._loader.valid_counts
        num_valid = 1 if self._loader.num_valid is None else self._loader.num_valid
        self.num_batches += 1
        self.num_samples += sum(counts) if counts is not None else self._accelerator.num_processes
        weight = num_valid if num_items is None or not num_valid else num_items
        if loss is not None and weight:
            share = loss.detach().float().reshape(()) * weight
            self._loss = share if self._loss is None else self._loss + share
            self._weight += weight

    def _gather(self, values: Any) -> Any:
        if values is None:
            return None
        if self._accelerator.num_processes > 1:
            values = self._accelerator.pad_across_processes(values, dim=1, pad_index=IGNORED)
        return self._accelerator.gather_for_metrics(values, loader=self._loader)

    def mean_loss(self) -> float | None:
        """Over all items of all ranks; None where no batch had a loss. Every rank calls it."""
        total = 0.0 if self._loss is None else self._loss.item()
        mean = self._accelerator.reduce_mean(total, self._weight).item()
        return None if mean != mean and not self._has_loss() else mean

    def _has_loss(self) -> bool:
        return self._loss is not None and bool(self._weight)


def per_sample(values: Any, num_rows: int | None) -> Any:
    """What has one row for each sample: of a tuple, the items that do; None where nothing does."""
    if isinstance(values, torch.Tensor):
        return values.detach() if values.ndim and (num_rows is None or len(values) == num_rows) else None
    if isinstance(values, tuple | list):
        kept = tuple(found for found in (per_sample(value, num_rows) for value in values) if found is not None)
        return None if not kept else kept[0] if len(kept) == 1 else kept
    return None


def named_metrics(found: Any, prefix: str) -> dict[str, Any]:
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


def _join(parts: list[Any]) -> Any:
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
