"""A rehearsal of the evaluation before the first update: what would fail after an epoch of training fails before it.

A few rows of the evaluation data, spread over all of it, go through the model and `compute_metrics`. Nothing of the training
changes: modules keep their modes and buffers, random streams and loaders their positions, and a metric that keeps something is
copied. Some metrics raise on few rows (an area under the curve where only one class occurs) or name what they find (a score of
each class); so one that raises, or lacks the name that is sought, is tried on many more rows before that counts.
"""

import copy
import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset

from headway.data.loader import PreparedLoader
from headway.errors import ConfigError, MetricError
from headway.trainer.data import length_of
from headway.trainer.evaluate import as_metric, named_metrics
from headway.trainer.loss import take_count

MOST_BATCHES = 32
_SPEED = ("runtime", "samples_per_second", "steps_per_second")
_NEVER_OF_THE_DATA = (NameError, ImportError)

Predict = Callable[[Any, int], tuple[torch.Tensor | None, Any, Any]]
"""From a batch and its number of rows to (loss, predictions, labels)."""


def spread(num_rows: int, batch_size: int, num_batches: int) -> list[list[int]]:
    """Numbers of rows for that many batches (fewer where there are not so many rows), each spread over all rows."""
    wanted = min(num_rows, batch_size * num_batches)
    count = max(1, -(-wanted // batch_size))
    rows = [index * num_rows // wanted for index in range(wanted)]
    return [rows[first::count] for first in range(count)]


def rows_of(loader: PreparedLoader, num_batches: int) -> Iterator[tuple[Any, int]] | None:
    """Batches of the loader's data and their rows, read past it; None where that cannot be done without a trace (a stream)."""
    dataset, sampler = loader.dataset, loader.batch_sampler
    num_rows = None if isinstance(dataset, IterableDataset) else length_of(dataset)
    if not num_rows or type(sampler) is not BatchSampler:
        return None
    batches = spread(num_rows, sampler.batch_size, num_batches)
    return ((loader.collate_fn([dataset[index] for index in batch]), len(batch)) for batch in batches)


class Rehearsal:
    """One evaluation's.

    Args:
        loader: the prepared loader; nothing is taken from it.
        to_device: moves a batch.
        predict: what is done with each batch.
        compute_metrics: the user's; None: only the loss is looked at.
        is_batchwise: it is called for each batch.
        prefix: what the metrics' names begin with.
    """

    def __init__(self, loader: PreparedLoader, to_device: Callable[[Any], Any], predict: Predict, compute_metrics: Any,
                 is_batchwise: bool, prefix: str) -> None:  # fmt: skip
        self._loader, self._to_device, self._predict = loader, to_device, predict
        self._compute_metrics, self._is_batchwise, self._prefix = compute_metrics, is_batchwise, prefix

    def run(self, wanted: str | None) -> dict[str, Any] | None:
        """The metrics of a few rows; None where they cannot be known.

        Args:
            wanted: the metric that should be among them.

        Raises:
            MetricError: `compute_metrics` raises, on few rows and on many.
        """
        try:
            found = self._of(1)
            if found is None or wanted is None or wanted in found or self._compute_metrics is None:
                return found
        except MetricError as error:
            if isinstance(error.__cause__, _NEVER_OF_THE_DATA):
                raise
        return self._of(MOST_BATCHES)

    def _of(self, num_batches: int) -> dict[str, Any] | None:
        batches = rows_of(self._loader, num_batches)
        if batches is None:
            return None
        metric = as_metric(_copied(self._compute_metrics), self._is_batchwise, None)
        found: dict[str, Any] = dict.fromkeys((f"{self._prefix}_{name}" for name in _SPEED), 0.0)
        num_rows = 0
        for batch, rows in batches:
            num_rows += rows
            inputs, _ = take_count(self._to_device(batch))
            loss, predictions, labels = self._predict(inputs, rows)
            if loss is not None:
                found[f"{self._prefix}_loss"] = 0.0
            if metric is not None:
                self._try(lambda: metric.update(predictions, labels), num_rows)  # noqa: B023  (called at once)
        if metric is not None:
            found |= self._try(lambda: named_metrics(metric.compute(), self._prefix), num_rows)
        return found

    def _try(self, act: Callable[[], Any], num_rows: int) -> Any:
        try:
            return act()
        except Exception as error:
            raise MetricError(
                f"compute_metrics raised {type(error).__name__}: {error}. It was tried on {num_rows} rows of the evaluation data "
                "before the training, not after its first epoch. Fix it, or override Trainer.check_evaluation to skip this "
                "rehearsal"
            ) from error


def _copied(metric: Any) -> Any:
    """A copy of what may keep something from call to call; what cannot be copied is used as it is."""
    try:
        return copy.deepcopy(metric)
    except Exception:
        return metric


def check_wanted(wanted: str, given: str, found: dict[str, Any]) -> None:
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


@contextmanager
def left_as_it_was(model: torch.nn.Module) -> Iterator[None]:
    """The model in evaluation mode without gradients; afterwards each module has its own mode, and each buffer its value."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def first_failure(told: Sequence[str | None]) -> str | None:
    """What the first rank that failed says; None where none did."""
    return next((text for text in told if text is not None), None)


def merged(several: Iterable[dict[str, Any] | None]) -> tuple[dict[str, Any], bool]:
    """(the metrics of all evaluations, are they all known?)."""
    known = list(several)
    found: dict[str, Any] = {}
    for each in known:
        found |= each or {}
    return found, all(each is not None for each in known)
