"""Steps of any batch, traced once each, and the searches among them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from headway.forecasting.answer import replayed
from headway.forecasting.device.devices import Device
from headway.forecasting.solve import BudgetSearch, LargestFit, LongestSequence
from headway.forecasting.tracing.events import MemoryEvent
from headway.forecasting.tracing.fake import Spread, trace
from headway.forecasting.tracing.step import StepRecipe
from headway.forecasting.tracing.trace import Trace

_ENDLESS = 1 << 20
_POINTS = 24
"""Batches of a curve of memory against the batch."""


class TraceCache:
    """Traces steps of any batch, each batch once.

    Args:
        model_fn: makes the model, here without memory.
        batch_fn: gives a micro-batch of so many samples.
        recipe: of the step.
        device: the target.
        prepare: is given the model before the first step; None: nothing is done.
        is_expandable: as PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
        spread: over which ranks; None: the model is on one process.
        counts_work: traces also count what operations compute and move.

    Attributes:
        num_traces: steps that were traced.
    """

    def __init__(
        self,
        model_fn: Callable[[], nn.Module],
        batch_fn: Callable[[int], Any],
        recipe: StepRecipe,
        device: Device,
        prepare: Callable[[nn.Module], object] | None,
        is_expandable: bool,
        spread: Spread | None = None,
        counts_work: bool = False,
    ) -> None:
        self._model_fn = model_fn
        self._batch_fn = batch_fn
        self._recipe = recipe
        self._device = device
        self._prepare = prepare
        self._is_expandable = is_expandable
        self._spread = spread
        self._counts_work = counts_work
        self._traces: dict[int, Trace] = {}
        self.num_traces = 0

    def trace(self, batch_size: int) -> Trace:
        """Two steps of micro-batches of so many samples."""
        if batch_size not in self._traces:
            self._traces[batch_size] = self._of(partial(self._batch_fn, batch_size))
        return self._traces[batch_size]

    def _of(self, batch: Callable[[], Any]) -> Trace:
        self.num_traces += 1
        parts = self._model_fn, batch, self._recipe, self._device, self._prepare
        return trace(*parts, spread=self._spread, counts_work=self._counts_work)

    def largest(self, capacity: int, limit: int = _ENDLESS) -> tuple[LargestFit, Sequence[tuple[int, int]]]:
        """The largest batch up to `limit` within so many bytes of the allocator, and (batch, bytes) of some up to beyond it."""
        search = BudgetSearch(lambda size: self.trace(size).events, self._reserved, capacity, limit)
        found = search.run()
        end = max(8, found.batch + found.batch // 4)
        return found, search.curve(sorted({max(1, round(end * part / _POINTS)) for part in range(1, _POINTS + 1)}))

    def curve(self, batches: Sequence[int]) -> list[tuple[int, int]]:
        """(batch, bytes of the allocator) of each, from two traces; empty where the events of these two differ."""
        return BudgetSearch(lambda size: self.trace(size).events, self._reserved, 0).curve(batches)

    def longest(self, longest: LongestSequence, batch_size: int, capacity: int) -> int:
        """The longest sequence within so many bytes of the allocator."""
        unit = longest.multiple
        search = BudgetSearch(
            lambda size: self._of(partial(longest.batch_fn, batch_size, size * unit)).events,
            self._reserved,
            capacity,
            longest.limit // unit,
            degree=2,
        )
        return search.run().batch * unit

    def _reserved(self, events: list[MemoryEvent]) -> int:
        return replayed(events, self._device, self._is_expandable).reserved
