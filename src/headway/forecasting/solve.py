"""The largest batch for a budget: two traces give the events of every batch, two more confirm the answer.

Where the sequence of events does not depend on the batch, the bytes of each are a + b * batch, and two traces give a and b. What a
batch of any size takes is then one replay, which costs milliseconds where a trace costs seconds. For the longest sequence it is the
same with three traces, as attention may keep what grows with the square of the length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from headway.common.garbage import no_garbage_search
from headway.errors import ConfigError
from headway.forecasting.tracing.events import MemoryEvent

PROBE = 8
"""One sample alone often takes another way through a model, and the kernels of very small batches are others."""
_ROUNDS = 6
_SAMPLES = 16
"""Sizes below an answer that are looked at."""

Events = Callable[[int], list[MemoryEvent]]


@dataclass(frozen=True)
class LongestSequence:
    """A search for the longest sequence.

    Attributes:
        batch_fn: gives a micro-batch of so many samples of such a length, as `batch_fn(batch_size, length)`.
        limit: no longer one is looked for: what the model allows.
        multiple: lengths are multiples of this.
    """

    batch_fn: Callable[[int, int], Any]
    limit: int = 1 << 20
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
        events: Events,
        takes: Callable[[list[MemoryEvent]], int],
        capacity: int,
        limit: int = 1 << 20,
        degree: int = 1,
    ) -> None:
        self._events, self._takes, self._capacity, self._limit = events, takes, capacity, limit
        self._degree = degree
        self._traced: dict[int, list[MemoryEvent]] = {}
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
                return 0 if not self._fits(1) else self._by_traces(PROBE)
            if self._fits(size):
                if size == bound or not self._fits(size + 1):
                    return size
                return self._by_traces(bound, size + 1)
            bound = size - 1
            # The events here are others than those of small sizes: go on from here.
            sized = self._sized_from(max(1, size - self._degree))
        return self._by_traces(bound)

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

    def _by_traces(self, limit: int, fitting: int = 0) -> int:
        return self._bisect(self._fits, limit, fitting)

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

    def _at(self, batch: int) -> list[MemoryEvent]:
        if batch not in self._traced:
            self._traced[batch] = self._events(batch)
        return self._traced[batch]
