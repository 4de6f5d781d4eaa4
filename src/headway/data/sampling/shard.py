"""Which samples each rank gets at each step, and how many of them are real: index arithmetic, nothing else.

An epoch is cut into rounds; in a round every rank gets one batch. All ranks run the same arithmetic over the same
order, so each knows the true counts of all others without asking. Real rows always lead; what follows them in a batch
only fills it up, and no rank ever has fewer rounds than another.

After a resume on another world no whole number of ordinary rounds may make up the global batch. Then the order is cut
into windows of `window` consecutive samples, each window into `num_rounds` rounds and each round among the ranks, all of
them as evenly as whole samples allow. Nothing is repeated to fill batches up, so that every update is that of the same
samples as before.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, cycle, islice
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class ShardIndex:
    """Which part of the data a process reads: the `index`-th of `count`, from 0."""

    index: int
    count: int


class RankBatch(NamedTuple):
    """One rank's part of one round.

    Attributes:
        indices: what the rank fetches, real ones first (empty where a stream was read).
        num_rows: rows of the rank's batch; None where a batch has no such thing.
        valid_counts: for each rank, how many leading rows of its batch are real; None where that is unknown.
        num_samples: real samples of the whole round, by which the epoch's position moves.
        is_last: no round follows.
    """

    indices: list[Any]
    num_rows: int | None
    valid_counts: tuple[int, ...] | None
    num_samples: int
    is_last: bool


class EpochStart(NamedTuple):
    """An epoch from some point on.

    Attributes:
        consumed: real samples before that point.
        opening: the first items of the epoch's order, which fill its last round up.
        rounds: what is left of it.
    """

    consumed: int
    opening: list[Any]
    rounds: Iterator[Any]


@dataclass(frozen=True)
class SampleSplit:
    """Cuts an order of samples: a round is `size * count` consecutive ones, and rank r gets the r-th `size` of them.

    Attributes:
        size: samples of one rank in one round.
        count: ranks.
        drop_last: leave an incomplete round out.
        is_even: complete the last round with samples from the start of the order.
        is_spread: an incomplete round is cut into short batches of equal size.
    """

    size: int
    count: int
    drop_last: bool = False
    is_even: bool = True
    is_spread: bool = False

    @cached_property
    def round_size(self) -> int:
        """Samples of one full round."""
        return self.size * self.count

    @cached_property
    def _full_counts(self) -> tuple[int, ...]:
        return (self.size,) * self.count

    def num_rounds(self, length: int) -> int:
        """Rounds of an order of `length` samples."""
        return length // self.round_size if self.drop_last else -(-length // self.round_size)

    def start(self, order: Sequence[Any] | Iterator[Any], consumed: int = 0, num_skipped: int = 0) -> EpochStart:
        """The epoch after `consumed` samples, or after `num_skipped` rounds where that is given."""
        size = self.round_size
        consumed = num_skipped * size or consumed
        rounds: Iterator[Any]
        if isinstance(order, Iterator):
            opening = list(islice(order, size))
            rest = islice(chain(opening, order), consumed, None)
            rounds = iter(lambda: list(islice(rest, size)), [])
        else:
            opening = as_list(order[:size])
            consumed = min(consumed, len(order))
            rounds = (order[begin : begin + size] for begin in range(consumed, len(order), size))
        if self.drop_last:
            rounds = (samples for samples in rounds if len(samples) == size)
        return EpochStart(consumed, opening, rounds)

    def share(self, samples: Sequence[T], rank: int, opening: list[T]) -> tuple[list[T], tuple[int, ...]]:
        """What `rank` gets of a round, and every rank's number of real samples."""
        size = self._size_in(samples)
        begin, end = rank * size, (rank + 1) * size
        if len(samples) == self.round_size:
            return as_list(samples[begin:end]), self._full_counts
        counts = tuple(min(max(len(samples) - r * size, 0), size) for r in range(self.count))
        real = as_list(samples)
        if self.is_even:
            return fill(real, opening, size * self.count)[begin:end], counts
        return real[begin:end] or real[:size], counts

    def _size_in(self, samples: Sequence[Any]) -> int:
        return min(self.size, -(-len(samples) // self.count)) if self.is_spread else self.size

    def offset(self, samples: Sequence[Any], rank: int) -> int:
        """How far into the round `rank`'s samples begin."""
        return rank * self._size_in(samples)


@dataclass(frozen=True)
class BatchSplit:
    """Hands out the ready-made batches of a custom batch sampler, whatever their sizes.

    Attributes:
        count: ranks.
        is_split: a round is one batch that all ranks share; otherwise it is `count` batches, one for each rank.
        drop_last: leave an incomplete round out.
        is_even: complete the last round with batches from the start of the order.
        size: what a short batch is completed to; None: batches have no common size.
    """

    count: int
    is_split: bool = False
    drop_last: bool = False
    is_even: bool = True
    size: int | None = None

    @property
    def round_size(self) -> int | None:
        """Samples of one full round; None where batches differ in size."""
        return None if self.size is None else self.size if self.is_split else self.size * self.count

    @property
    def _batches_per_round(self) -> int:
        return 1 if self.is_split else self.count

    def num_rounds(self, length: int) -> int:
        """Rounds of `length` batches."""
        return length // self._batches_per_round if self.drop_last else -(-length // self._batches_per_round)

    def start(self, order: Iterable[Sequence[Any]], consumed: int = 0, num_skipped: int = 0) -> EpochStart:
        """The epoch after `consumed` samples, or after `num_skipped` rounds where that is given."""
        # Copies: a sampler may go on using the list that it handed out.
        batches: Iterator[list[Any]] = map(list, order)
        opening = list(islice(batches, self.count))
        batches = chain(opening, batches)
        if num_skipped:
            consumed = sum(map(len, islice(batches, num_skipped * self._batches_per_round)))
        else:
            batches = _drop_samples(batches, consumed)
        rounds = iter(lambda: list(islice(batches, self._batches_per_round)), [])
        if self.drop_last:
            rounds = (batches for batches in rounds if len(batches) == self._batches_per_round)
        return EpochStart(consumed, opening, rounds)

    def share(self, batches: list[list[Any]], rank: int, opening: list[list[Any]]) -> tuple[list[Any], tuple[int, ...]]:
        """What `rank` gets of a round, and every rank's number of real samples."""
        pieces = self._pieces(batches)
        counts = tuple(map(len, pieces))
        own = pieces[rank]
        if not self.is_even:
            return own or pieces[0], counts
        if self.is_split:
            return fill(own, list(chain(*opening)), len(pieces[0])), counts
        # Ranks without a batch take the epoch's first ones in turn.
        own = own or opening[(rank - len(batches)) % len(opening)]
        return fill(own, list(chain(*opening)), self.size or 0), counts

    def offset(self, batches: list[list[Any]], rank: int) -> int:
        """How far into the round `rank`'s samples begin."""
        return sum(map(len, self._pieces(batches)[:rank]))

    def _pieces(self, batches: list[list[Any]]) -> list[list[Any]]:
        if not self.is_split:
            return batches + [[]] * (self.count - len(batches))
        (batch,) = batches
        size = -(-len(batch) // self.count)
        return [batch[rank * size : (rank + 1) * size] for rank in range(self.count)]


def fill(samples: list[T], source: list[T], size: int) -> list[T]:
    """`samples` completed to `size` from `source`, over and over; as they are where they are enough."""
    return samples + list(islice(cycle(source), size - len(samples))) if len(samples) < size else samples


def as_list(samples: Sequence[T]) -> list[T]:
    """A list of plain Python numbers, whether they came as an array, a range or a list."""
    if type(samples) is list:
        return samples
    to_list = getattr(samples, "tolist", None)
    return to_list() if to_list is not None else list(samples)


def mark_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Each item with whether it is the last one, known by looking one ahead."""
    iterator = iter(items)
    for current in islice(iterator, 1):
        for following in iterator:
            yield current, False
            current = following
        yield current, True


def _drop_samples(batches: Iterator[list[Any]], num_samples: int) -> Iterator[list[Any]]:
    for batch in batches:
        if num_samples < len(batch):
            yield batch[num_samples:]
            break
        num_samples -= len(batch)
    yield from batches


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


def _part(length: int, index: int, count: int) -> slice:
    """The `index`-th of `count` consecutive parts of `length` things, which differ by one at most."""
    return slice(index * length // count, (index + 1) * length // count)
