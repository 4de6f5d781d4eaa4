"""Rounds that keep a global batch which no whole number of ordinary rounds makes up: after a resume on another world.

The order is cut into windows of `window` consecutive samples, each window into `num_rounds` rounds and each round among
the ranks, all of them as evenly as whole samples allow. Nothing is repeated to fill batches up, so that every update is
that of the same samples as before.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from headway.data.sampling.shard import EpochStart, as_list

T = TypeVar("T")


@dataclass(frozen=True)
class WindowSplit:
    """Cuts an order of samples into windows, and those into rounds.

    Attributes:
        window: samples of one update.
        num_rounds_each: rounds of a full window, at most as many as it has samples.
        count: ranks.
        unit: of an end that fills no window, what does not make up a multiple of this is left out; 1: nothing is.
        is_even: without effect; a rank of a round with fewer samples than ranks gets a sample that counts for nothing.
    """

    window: int
    num_rounds_each: int
    count: int
    unit: int = 1
    is_even: bool = True

    @property
    def drop_last(self) -> bool:
        """Is part of an incomplete window left out?"""
        return self.unit > 1

    @property
    def round_size(self) -> int | None:
        """Samples of one round; None where they vary."""
        return self.window if self.num_rounds_each == 1 else None

    @property
    def _largest(self) -> int:
        return -(-self.window // self.num_rounds_each)

    def _num_in(self, length: int) -> int:
        """Rounds of a window of `length` samples."""
        return self.num_rounds_each if length == self.window else -(-length // self._largest)

    def num_rounds(self, length: int) -> int:
        """Rounds of an order of `length` samples."""
        full, rest = divmod(length, self.window)
        return full * self.num_rounds_each + self._num_in(rest - rest % self.unit)

    def start(self, order: Sequence[Any] | Iterator[Any], consumed: int = 0, num_skipped: int = 0) -> EpochStart:
        """The epoch after `consumed` samples, which begins a window there, or after `num_skipped` rounds."""
        windows = self._windows(order, consumed if not num_skipped else 0)
        rounds = (part for window in windows for part in self._rounds(window))
        if num_skipped:
            consumed = sum(map(len, islice(rounds, num_skipped)))
        return EpochStart(consumed, [], rounds)

    def _windows(self, order: Sequence[object] | Iterator[object], consumed: int) -> Iterator[Sequence[Any]]:
        windows: Iterator[Sequence[Any]]
        if isinstance(order, Iterator):
            rest = islice(order, consumed, None)
            windows = iter(lambda: list(islice(rest, self.window)), [])
        else:
            windows = (order[begin : begin + self.window] for begin in range(consumed, len(order), self.window))
        for window in windows:
            length = len(window)
            if length < self.window:
                length -= length % self.unit
            if length:
                yield window[:length]

    def _rounds(self, window: Sequence[object]) -> Iterator[Sequence[Any]]:
        number = self._num_in(len(window))
        return (window[_part(len(window), k, number)] for k in range(number))

    def share(self, samples: Sequence[T], rank: int, opening: list[T]) -> tuple[list[T], tuple[int, ...]]:
        """What `rank` gets of a round, and every rank's number of real samples."""
        parts = [_part(len(samples), r, self.count) for r in range(self.count)]
        return as_list(samples[parts[rank]]) or as_list(samples[:1]), tuple(each.stop - each.start for each in parts)

    def offset(self, samples: Sequence[Any], rank: int) -> int:
        """How far into the round `rank`'s samples begin."""
        return rank * len(samples) // self.count

    def count_samples(self, samples: Sequence[object]) -> int:
        """Real samples of a round."""
        return len(samples)


def _part(length: int, index: int, count: int) -> slice:
    """The `index`-th of `count` consecutive parts of `length` things, which differ by one at most."""
    return slice(index * length // count, (index + 1) * length // count)
