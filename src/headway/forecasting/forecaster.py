"""One step with batches of any size: each size is traced once, answered for the device, and searched among.

Where the sequence of events does not depend on the batch, the bytes of each are a + b * batch, and two traces give a and b. What a
batch of any size takes is then one replay, which costs milliseconds where a trace costs seconds; two traces more confirm the answer.
For the longest sequence it is the same with three traces, as attention may keep what grows with the square of the length.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

from headway.common.garbage import no_garbage_search
from headway.errors import ConfigError
from headway.forecasting.answer import Forecast, of_trace, replayed
from headway.forecasting.device.allocator import MemoryEvent, told_apart
from headway.forecasting.device.devices import Device, room, spread
from headway.forecasting.tracing.fake import Spread, trace
from headway.forecasting.tracing.repeats import RepeatProof
from headway.forecasting.tracing.step import StepRecipe
from headway.forecasting.tracing.trace import Trace

logger = logging.getLogger(__name__)

_ENDLESS = 1 << 20
PROBE = 8
"""One sample alone often takes another way through a model, and the kernels of very small batches are others."""
_POINTS = 12
"""Batches of a curve of memory against the batch."""
_ROUNDS = 6
_SAMPLES = 16
"""Sizes below an answer that are looked at."""


@dataclass(frozen=True)
class LongestSequence:
    """A search for the longest sequence.

    Attributes:
        batch_fn: gives a micro-batch of so many samples of such a length, as `batch_fn(batch_size, length)`.
        limit: no longer one is looked for: what the model allows.
        multiple: lengths are multiples of this.
    """

    batch_fn: Callable[[int, int], Any]
    limit: int = _ENDLESS
    multiple: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.multiple <= self.limit:
            raise ConfigError(
                f"LongestSequence(limit={self.limit}, multiple={self.multiple}): give a multiple of 1 or more, and a limit that is "
                "no smaller"
            )


class SizedEvents:
    """The events of a step of any size, from those of a few sizes.

    Each event's bytes are the polynomial through its values, of degree one for two traces (Newton's forward differences).

    Args:
        traces: at `begin` and at the sizes that follow it one by one, alike.
        begin: the first of these sizes.
    """

    def __init__(self, traces: Sequence[list[MemoryEvent]], begin: int) -> None:
        self._begin = begin
        self._keys, _, *self._rest = zip(*traces[0])
        columns = [[event.num_bytes for event in trace] for trace in traces]
        self._differences: list[list[int]] = []
        while columns:
            self._differences.append(columns[0])
            columns = [[later - value for value, later in zip(*pair)] for pair in pairwise(columns)]

    def num_bytes(self, size: int) -> list[int]:
        """Of each event at this size."""
        found, factor = self._differences[0], 1
        for order, column in enumerate(self._differences[1:]):
            factor = factor * (size - self._begin - order) // (order + 1)
            found = [total + factor * value for total, value in zip(found, column)]
        return found

    @no_garbage_search()
    def at(self, size: int) -> list[MemoryEvent]:
        """The events at this size."""
        return list(map(MemoryEvent._make, zip(self._keys, self.num_bytes(size), *self._rest)))


def alike(first: list[MemoryEvent], second: list[MemoryEvent]) -> bool:
    """Do the same operations ask and give back in the same order?"""
    if len(first) != len(second):
        return False
    return all(
        one.key == other.key and one.what == other.what and (one.num_bytes < 0) == (other.num_bytes < 0)
        for one, other in zip(first, second)
    )


class BudgetSearch:
    """Finds the largest batch, or the longest sequence, that stays within a number of bytes.

    Args:
        events: traces a step of that size.
        takes: bytes that such events take.
        capacity: bytes that there are.
        limit: no larger size is looked for.
        degree: of the polynomial in the size that an event's bytes are: 1 for batches, 2 for sequences under attention.
    """

    def __init__(
        self,
        events: Callable[[int], list[MemoryEvent]],
        takes: Callable[[list[MemoryEvent]], int],
        capacity: int,
        limit: int = _ENDLESS,
        degree: int = 1,
    ) -> None:
        self._at = cache(events)
        self._takes, self._capacity, self._limit, self._degree = takes, capacity, limit, degree
        self._sized: dict[int, SizedEvents | None] = {}

    def run(self) -> int:
        """The largest size, 0 where not even one fits; it has been traced and fits, and one more has been traced and does not."""
        bound = self._limit
        sized = self._sized_from(PROBE) if PROBE + self._degree <= bound else None
        for _ in range(_ROUNDS):
            if sized is None:
                break
            size = self._without_gaps(sized, self._bisect_synthetic(sized, bound))
            if size == 0:
                return self._bisect(self._fits, PROBE) if self._fits(1) else 0
            if self._fits(size):
                if size == bound or not self._fits(size + 1):
                    return size
                return self._bisect(self._fits, bound, size + 1)
            bound = size - 1
            # The events here are others than those of small sizes: go on from here.
            sized = self._sized_from(max(1, size - self._degree))
        return self._bisect(self._fits, bound)

    def _sized_from(self, begin: int) -> SizedEvents | None:
        """The events of all sizes; None where those of `begin` and the sizes after it are not alike."""
        if begin not in self._sized:
            first, *others = traces = [self._at(begin + step) for step in range(self._degree + 1)]
            is_regular = first and all(alike(first, other) for other in others)
            self._sized[begin] = SizedEvents(traces, begin) if is_regular else None
        return self._sized[begin]

    def curve(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """(size, bytes that it takes) of each of these sizes, from the first traces; empty where their sequences differ."""
        sized = self._sized_from(PROBE)
        return [] if sized is None else [(size, self._takes(sized.at(size))) for size in sizes]

    def _bisect_synthetic(self, sized: SizedEvents, bound: int) -> int:
        """The allocator takes a little more than the tensors, whose sum is quick: only sizes near that limit are replayed."""
        bound = self._bisect(lambda size: max(accumulate(sized.num_bytes(size))) <= self._capacity, bound)
        near = bound - bound // 8
        fits = partial(self._fits_synthetic, sized)
        return self._bisect(fits, bound, near if near and fits(near) else 0)

    def _fits_synthetic(self, sized: SizedEvents, size: int) -> bool:
        return self._takes(sized.at(size)) <= self._capacity

    def _without_gaps(self, sized: SizedEvents, size: int) -> int:
        """Fragments make a smaller size take more now and then: no answer above one that does not fit."""
        stride = max(1, size // (2 * _SAMPLES))
        sizes = range(size - stride, size // 2, -stride)
        return min((each - 1 for each in sizes if not self._fits_synthetic(sized, each)), default=size)

    def _bisect(self, fits: Callable[[int], bool], limit: int, fitting: int = 0) -> int:
        """The largest size from `fitting`, which fits, to `limit` that fits; a size fits if all smaller ones do."""
        low, high = fitting, max(1, fitting * 2)
        while high <= limit and fits(high):
            low, high = high, high * 2
        high = min(high, limit + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _fits(self, batch: int) -> bool:
        return self._takes(self._at(batch)) <= self._capacity


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

        def events(size: int) -> list[MemoryEvent]:
            length = size * longest.multiple
            batch = partial(longest.batch_fn, batch_size, length)
            return self._trace_batch(batch, f"{batch_size} x {length:,}").events

        limit = longest.limit // longest.multiple
        return BudgetSearch(events, self._reserved, capacity, limit, degree=2).run() * longest.multiple

    def _trace_batch(self, batch: Callable[..., Any], shown: str) -> Trace:
        self.num_traces += 1
        logger.info("tracing a step of %s", shown)
        parts = self.model_fn, batch, self.recipe, self.device, self.prepare
        return trace(*parts, self.spread, self.counts_work, self.can_repeat, self._proofs)

    @no_garbage_search()
    def _reserved(self, events: list[MemoryEvent]) -> int:
        known, unsure = told_apart(events)
        return replayed(known, self.device, self.is_expandable).reserved + unsure
