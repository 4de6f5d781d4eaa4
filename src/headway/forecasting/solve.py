"""The largest batch for a budget: two traces give the events of every batch, two more confirm the answer.

Where the sequence of events does not depend on the batch, the bytes of each are a + b * batch, and two traces give a and b. What a
batch of any size takes is then one replay, which costs milliseconds where a trace costs seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from headway.forecasting.events import Event

PROBES = (8, 9)
"""One sample alone often takes another way through a model, and the kernels of very small batches are others."""
_ROUNDS = 6
_SAMPLES = 16
"""Sizes below an answer that are looked at."""

Events = Callable[[int], list[Event]]


@dataclass(frozen=True)
class Largest:
    """The answer.

    Attributes:
        batch: samples; 0: not even one fits.
        num_traces: how many steps were traced for it.
        is_synthesised: the search ran on synthesised events; False: every size that was tried was traced.
    """

    batch: int
    num_traces: int
    is_synthesised: bool


def synthesise(first: list[Event], second: list[Event], sizes: tuple[int, int], batch: int) -> list[Event] | None:
    """The events at `batch` from those at two sizes; None where the sequences differ."""
    if not alike(first, second):
        return None
    begin, step = sizes[0], sizes[1] - sizes[0]
    return [
        one._replace(num_bytes=one.num_bytes + (other.num_bytes - one.num_bytes) * (batch - begin) // step)
        for one, other in zip(first, second)
    ]


def alike(first: list[Event], second: list[Event]) -> bool:
    """Do the same operations ask and give back in the same order?"""
    if len(first) != len(second):
        return False
    return all(
        one.key == other.key and one.what == other.what and (one.num_bytes < 0) == (other.num_bytes < 0)
        for one, other in zip(first, second)
    )


class Search:
    """Finds the largest batch that stays within a number of bytes.

    Args:
        events: traces a step of that batch.
        takes: bytes that such events take.
        capacity: bytes that there are.
        limit: no larger batch is looked for.
    """

    def __init__(
        self, events: Events, takes: Callable[[list[Event]], int], capacity: int, limit: int = 1 << 20
    ) -> None:
        self._events = events
        self._takes = takes
        self._capacity = capacity
        self._limit = limit
        self._traced: dict[int, list[Event]] = {}

    def run(self) -> Largest:
        """Search; the answer has been traced and fits, and one sample more has been traced and does not."""
        low, high = PROBES
        first, second = self._at(low), self._at(high)
        if not alike(first, second):
            return self._by_traces(self._limit)
        bound = self._limit
        for _ in range(_ROUNDS):
            batch = self._without_gaps((low, high), self._bisect(partial(self._fits_synthetic, (low, high)), bound))
            if batch == 0:
                return self._answer(0, True) if not self._fits(1) else self._by_traces(PROBES[0])
            if self._fits(batch):
                if batch == bound or not self._fits(batch + 1):
                    return self._answer(batch, True)
                return self._by_traces(bound, batch + 1)
            bound = batch - 1
            # The events here are others than those of small batches: go on from here.
            if not alike(self._at(batch), self._at(max(1, batch - 1))):
                break
            low, high = max(1, batch - 1), batch
        return self._by_traces(bound)

    def _fits_synthetic(self, probes: tuple[int, int], batch: int) -> bool:
        events = synthesise(self._at(probes[0]), self._at(probes[1]), probes, batch)
        assert events is not None
        return self._takes(events) <= self._capacity

    def _without_gaps(self, probes: tuple[int, int], batch: int) -> int:
        """Fragments make a smaller batch take more now and then: no answer above one that does not fit."""
        stride = max(1, batch // (2 * _SAMPLES))
        sizes = range(batch - stride, batch // 2, -stride)
        return min((size - 1 for size in sizes if not self._fits_synthetic(probes, size)), default=batch)

    def _by_traces(self, limit: int, fitting: int = 0) -> Largest:
        return self._answer(self._bisect(self._fits, limit, fitting), False)

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

    def _at(self, batch: int) -> list[Event]:
        if batch not in self._traced:
            self._traced[batch] = self._events(batch)
        return self._traced[batch]

    def _answer(self, batch: int, is_synthesised: bool) -> Largest:
        return Largest(batch, len(self._traced), is_synthesised)
