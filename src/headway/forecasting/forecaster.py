"""One step with batches of any size: each size is traced once, answered for the device, and searched among."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from headway.common.garbage import no_garbage_search
from headway.forecasting.answer import Forecast, of_trace, replayed
from headway.forecasting.device.devices import Device, room, spread
from headway.forecasting.solve import BudgetSearch, LongestSequence
from headway.forecasting.tracing.events import MemoryEvent, told_apart
from headway.forecasting.tracing.fake import Spread, trace
from headway.forecasting.tracing.repeats import RepeatProof
from headway.forecasting.tracing.step import StepRecipe
from headway.forecasting.tracing.trace import Trace

logger = logging.getLogger(__name__)

_ENDLESS = 1 << 20
_POINTS = 12
"""Batches of a curve of memory against the batch."""


@dataclass
class StepForecaster:
    """Forecasts steps of any batch.

    Attributes:
        model_fn: makes the model, here without memory.
        batch_fn: gives a micro-batch of so many samples, and of a length where the recipe has lengths.
        recipe: of the step.
        device: the target.
        prepare: is given the model before the first step; None: nothing is done.
        is_expandable: as PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
        spread: over which ranks; None: the model is on one process.
        can_repeat: `spread` treats blocks alike, however many there are.
        counts_work: traces also count what operations compute and move.
        num_traces: steps that were traced.
    """

    model_fn: Callable[[], nn.Module]
    batch_fn: Callable[..., Any]
    recipe: StepRecipe
    device: Device
    prepare: Callable[[nn.Module], object] | None = None
    is_expandable: bool = False
    spread: Spread | None = None
    counts_work: bool = False
    can_repeat: bool = True
    num_traces: int = field(default=0, init=False)
    _traces: dict[int, Trace] = field(default_factory=dict, init=False)
    _proofs: list[RepeatProof] = field(default_factory=list, init=False)

    def forecast(
        self, batch_size: int, limit: int | None, largest: bool = False, longest: LongestSequence | None = None
    ) -> Forecast:
        """What a step takes.

        Args:
            batch_size: samples of a micro-batch.
            limit: bytes that the whole process may take; None: unknown, and nothing is searched for.
            largest: search for the largest batch, too.
            longest: the search for the longest sequence; None: it is not looked for.
        """
        began = time.perf_counter()
        found = of_trace(self.trace(batch_size), self.device, batch_size, limit, self.is_expandable)
        if limit is not None:
            capacity = room(self.device, limit)
            if largest:
                batch, curve = self.largest(capacity)
                by_batch = tuple((size, spread(self.device, taken)[2]) for size, taken in curve)
                found = replace(found, largest_batch=batch, by_batch=by_batch)
            if longest is not None:
                found = replace(found, longest_sequence=self._longest(longest, batch_size, capacity))
        return replace(found, num_traces=self.num_traces, seconds=time.perf_counter() - began)

    def trace(self, batch_size: int) -> Trace:
        """The recipe's steps, of micro-batches of so many samples."""
        if batch_size not in self._traces:
            self._traces[batch_size] = self._trace_batch(partial(self.batch_fn, batch_size), f"{batch_size} samples")
        return self._traces[batch_size]

    def largest(self, capacity: int, limit: int = _ENDLESS) -> tuple[int, Sequence[tuple[int, int]]]:
        """The largest batch up to `limit` within so many bytes of the allocator, and (batch, bytes) of some up to beyond it."""
        search = self._search(capacity, limit)
        found = search.run()
        end = max(8, found + found // 4)
        return found, search.curve(sorted({max(1, round(end * part / _POINTS)) for part in range(1, _POINTS + 1)}))

    def curve(self, batches: Sequence[int]) -> list[tuple[int, int]]:
        """(batch, bytes of the allocator) of each, from two traces; empty where the events of these two differ."""
        return self._search(0).curve(batches)

    def _search(self, capacity: int, limit: int = _ENDLESS) -> BudgetSearch:
        return BudgetSearch(lambda size: self.trace(size).events, self._reserved, capacity, limit)

    def _longest(self, longest: LongestSequence, batch_size: int, capacity: int) -> int:
        unit = longest.multiple
        search = BudgetSearch(
            lambda size: (
                self._trace_batch(
                    partial(longest.batch_fn, batch_size, size * unit), f"{batch_size} x {size * unit:,}"
                ).events
            ),
            self._reserved,
            capacity,
            longest.limit // unit,
            degree=2,
        )
        return search.run() * unit

    def _trace_batch(self, batch: Callable[..., Any], shown: str) -> Trace:
        self.num_traces += 1
        logger.info("tracing a step of %s", shown)
        parts = self.model_fn, batch, self.recipe, self.device, self.prepare
        return trace(*parts, self.spread, self.counts_work, self.can_repeat, self._proofs)

    @no_garbage_search()
    def _reserved(self, events: list[MemoryEvent]) -> int:
        known, unsure = told_apart(events)
        return replayed(known, self.device, self.is_expandable).reserved + unsure
