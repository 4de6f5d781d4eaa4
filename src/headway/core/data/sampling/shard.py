"""Index arithmetic that assigns samples to ranks at each step, and counts those that are not padding.

An epoch is divided into rounds. A round is one step: one batch for every rank. All ranks do the same arithmetic over
the same order, so each knows the row counts of all others without an exchange. Rows that are added only to complete a
batch are padding. They come last in a batch and are not counted. All ranks have the same number of rounds.

After a resume with a different world size, the number of samples per update might not be a multiple of the samples per
round. The order is then divided into windows, which contain the samples of one update each. A window is divided into
rounds, and a round is divided among the ranks as evenly as possible. Nothing is repeated to fill batches, so that every
update uses the same samples as before.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, cycle, islice
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class ShardIndex:
    """Data shard of a process.

    Attributes:
        index: Index of the shard, from 0.
        count: Number of shards.
    """

    index: int
    count: int


class RankBatch(NamedTuple):
    """Description of one rank's samples in one step, with row counts.

    Attributes:
        indices: Indices that the rank fetches, padding last; empty if an iterable dataset was read.
        num_rows: Number of rows in the rank's batch; None if its rows cannot be counted.
        valid_counts: Number of non-padding rows in the batch of each rank, indexed by rank; None if unknown.
        num_samples: Number of non-padding samples in the step over all ranks, by which the position in the epoch
            advances.
        is_last: Whether this is the last step of the epoch.
    """

    indices: list[Any]
    num_rows: int | None
    valid_counts: tuple[int, ...] | None
    num_samples: int
    is_last: bool


class EpochStart(NamedTuple):
    """Remainder of an epoch after a starting point.

    Attributes:
        consumed: Number of non-padding samples before the starting point.
        opening: First items of the epoch's order, used as padding for the last step; empty in a `WindowSplit`. An item
            is a sample (or its index) or, in a `BatchSplit`, a batch of indices.
        rounds: Iterator over the remaining steps. Each element contains the items of one step on all ranks.
    """

    consumed: int
    opening: list[Any]
    rounds: Iterator[Any]


@dataclass(frozen=True)
class SampleSplit:
    """Split of an epoch's order into rounds of `size * count` consecutive samples.

    A round is one step: one batch for every rank. Rank r gets the r-th chunk of `size` samples of each round.

    Attributes:
        size: Number of samples per rank and round.
        count: Number of ranks.
        drop_last: Whether to leave out an incomplete round.
        is_even: Whether to complete the last round with samples from the start of the order.
        is_spread: Whether to divide the samples of an incomplete round evenly among the ranks, as shorter batches.
            Otherwise the first ranks get full batches.
    """

    size: int
    count: int
    drop_last: bool = False
    is_even: bool = True
    is_spread: bool = False

    @cached_property
    def round_size(self) -> int:
        """Number of samples that all ranks together get in a full step."""
        return self.size * self.count

    @cached_property
    def _full_counts(self) -> tuple[int, ...]:
        return (self.size,) * self.count

    def count_rounds(self, length: int) -> int:
        """Return the number of steps in an epoch of `length` samples. In each step every rank gets one batch."""
        return length // self.round_size if self.drop_last else -(-length // self.round_size)

    def split_epoch(self, order: Sequence[Any] | Iterator[Any], consumed: int = 0, num_skipped: int = 0) -> EpochStart:
        """Return the remainder of the epoch after `consumed` samples, or after `num_skipped` steps if that is not 0.

        Args:
            order: Order of the epoch's samples.
            consumed: Number of non-padding samples after which to start. Default: 0.
            num_skipped: Number of batches per rank after which to start. Default: 0.
        """
        size = self.round_size
        consumed = num_skipped * size or consumed
        rounds: Iterator[Any]
        if isinstance(order, Iterator):
            opening = list(islice(order, size))
            rest = islice(chain(opening, order), consumed, None)
            rounds = iter(lambda: list(islice(rest, size)), [])
            if self.drop_last:
                rounds = (samples for samples in rounds if len(samples) == size)
        else:
            opening = convert_to_list(order[:size])
            consumed = min(consumed, len(order))
            end = len(order)
            if self.drop_last:
                end -= (end - consumed) % size
            rounds = _iterate_slices(order, consumed, end, size)
        return EpochStart(consumed, opening, rounds)

    def get_share(self, samples: Sequence[T], rank: int, opening: list[T]) -> tuple[list[T], tuple[int, ...]]:
        """Return the samples of `rank` in one step, and the number of non-padding samples of every rank.

        An incomplete step is padded if `is_even`. Otherwise only a rank without samples gets padding: the samples of
        rank 0.

        Args:
            samples: Samples of the step on all ranks.
            rank: Rank whose samples are returned.
            opening: First samples of the epoch, used as padding for an incomplete step.
        """
        size = self.size
        if len(samples) == self.round_size:
            return convert_to_list(samples[rank * size : (rank + 1) * size]), self._full_counts
        size = self._size_in(samples)
        begin, end = rank * size, (rank + 1) * size
        counts = tuple(min(max(len(samples) - r * size, 0), size) for r in range(self.count))
        real = convert_to_list(samples)
        if self.is_even:
            return fill_by_cycling(real, opening, size * self.count)[begin:end], counts
        return real[begin:end] or real[:size], counts

    def _size_in(self, samples: Sequence[Any]) -> int:
        return min(self.size, -(-len(samples) // self.count)) if self.is_spread else self.size

    def find_offset(self, samples: Sequence[Any], rank: int) -> int:
        """Return the index of the first sample of `rank` within the samples of one step.

        If the rank has no samples, the index can be beyond the end of the samples.

        Args:
            samples: Samples of the step on all ranks.
            rank: Rank whose first sample is located.
        """
        return rank * self._size_in(samples)


@dataclass(frozen=True)
class BatchSplit:
    """Split of a custom batch sampler's batches among the ranks. These batches may differ in size.

    A round is one step: one batch for every rank.

    Attributes:
        count: Number of ranks.
        is_split: Whether a round is one batch that is split among the ranks. Otherwise it is one batch per rank.
        drop_last: Whether to leave out an incomplete round.
        is_even: Whether to complete the last round with batches from the start of the order.
        size: Size to which a short batch is completed; None if batches have no common size.
    """

    count: int
    is_split: bool = False
    drop_last: bool = False
    is_even: bool = True
    size: int | None = None

    @property
    def round_size(self) -> int | None:
        """Number of samples that all ranks together get in a full step; None if batches differ in size."""
        return None if self.size is None else self.size if self.is_split else self.size * self.count

    @property
    def _batches_per_round(self) -> int:
        return 1 if self.is_split else self.count

    def count_rounds(self, length: int) -> int:
        """Return the number of steps in an epoch for which the batch sampler yields `length` batches.

        In each step every rank gets one batch.

        Args:
            length: Number of batches that the batch sampler yields.
        """
        return length // self._batches_per_round if self.drop_last else -(-length // self._batches_per_round)

    def split_epoch(self, order: Iterable[Sequence[Any]], consumed: int = 0, num_skipped: int = 0) -> EpochStart:
        """Return the remainder of the epoch after `consumed` samples, or after `num_skipped` steps if that is not 0.

        Args:
            order: Batches of the epoch, as the batch sampler yields them.
            consumed: Number of non-padding samples after which to start. Default: 0.
            num_skipped: Number of batches per rank after which to start. Default: 0.
        """
        # Copy, because a sampler may continue to use the list that it yielded.
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

    def get_share(
        self, batches: list[list[Any]], rank: int, opening: list[list[Any]]
    ) -> tuple[list[Any], tuple[int, ...]]:
        """Return the samples of `rank` in one step, and the number of non-padding samples of every rank.

        Short batches and missing batches are padded if `is_even`. Otherwise only a rank without samples gets padding:
        the samples of rank 0.

        Args:
            batches: Batches of the step, as the batch sampler yields them. With `is_split`, there is exactly one.
            rank: Rank whose samples are returned.
            opening: First batches of the epoch, used as padding for an incomplete step.
        """
        pieces = self._split_by_rank(batches)
        counts = tuple(map(len, pieces))
        own = pieces[rank]
        if not self.is_even:
            return own or pieces[0], counts
        if self.is_split:
            return fill_by_cycling(own, list(chain(*opening)), len(pieces[0])), counts
        # Ranks without a batch get the epoch's first batches, round-robin.
        own = own or opening[(rank - len(batches)) % len(opening)]
        return fill_by_cycling(own, list(chain(*opening)), self.size or 0), counts

    def find_offset(self, batches: list[list[Any]], rank: int) -> int:
        """Return the index of the first sample of `rank` within the samples of one step on all ranks.

        Args:
            batches: Batches of the step, as the batch sampler yields them.
            rank: Rank whose first sample is located.
        """
        return sum(map(len, self._split_by_rank(batches)[:rank]))

    def _split_by_rank(self, batches: list[list[Any]]) -> list[list[Any]]:
        if not self.is_split:
            return batches + [[]] * (self.count - len(batches))
        (batch,) = batches
        size = -(-len(batch) // self.count)
        return [batch[rank * size : (rank + 1) * size] for rank in range(self.count)]


def fill_by_cycling(samples: list[T], source: list[T], size: int) -> list[T]:
    """Return `samples` extended to `size` elements with elements of `source`, which is repeated as often as needed.

    If `samples` is long enough, it is returned unchanged.

    Args:
        samples: List to extend.
        source: Elements to append.
        size: Minimum length of the result.
    """
    return samples + list(islice(cycle(source), size - len(samples))) if len(samples) < size else samples


def convert_to_list(samples: Sequence[T]) -> list[T]:
    """Return the samples as a list. An array's elements become Python numbers, and a list is returned unchanged."""
    if type(samples) is list:
        return samples
    to_list = getattr(samples, "tolist", None)
    return to_list() if to_list is not None else list(samples)


def _iterate_slices(order: Sequence[T], begin: int, end: int, size: int) -> Iterator[Sequence[T]]:
    """Return an iterator over consecutive slices of `order[begin:end]` with `size` items each.

    The last slice can be shorter.
    """
    starts = range(begin, end, size)
    stops = range(begin + size, end + size, size)
    # Maps run in C. A generator would be one more Python frame for each batch.
    return map(order.__getitem__, map(slice, starts, stops))


def mark_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yield pairs of (item, whether it is the last one), by reading one item ahead."""
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
    """Split of an epoch's order into windows, which contain the samples of one update each.

    Each window is split into rounds. A round is one step: one batch for every rank.

    Attributes:
        window: Number of samples per update.
        num_rounds_each: Number of rounds in a full window. At most `window`.
        count: Number of ranks.
        unit: An incomplete last window is truncated to a multiple of this number of samples; 1 keeps all of them.
        is_even: No effect. In a round with fewer samples than ranks, each rank without samples gets one sample as
            padding.
    """

    window: int
    num_rounds_each: int
    count: int
    unit: int = 1
    is_even: bool = True

    @property
    def drop_last(self) -> bool:
        """Whether samples of an incomplete last window may be dropped."""
        return self.unit > 1

    @property
    def round_size(self) -> int | None:
        """Number of samples that all ranks together get per step; None if it varies."""
        return self.window if self.num_rounds_each == 1 else None

    @property
    def _largest(self) -> int:
        return -(-self.window // self.num_rounds_each)

    def _num_in(self, length: int) -> int:
        """Return the number of steps in a window of `length` samples. In each step every rank gets one batch."""
        return self.num_rounds_each if length == self.window else -(-length // self._largest)

    def count_rounds(self, length: int) -> int:
        """Return the number of steps in an epoch of `length` samples. In each step every rank gets one batch."""
        full, rest = divmod(length, self.window)
        return full * self.num_rounds_each + self._num_in(rest - rest % self.unit)

    def split_epoch(self, order: Sequence[Any] | Iterator[Any], consumed: int = 0, num_skipped: int = 0) -> EpochStart:
        """Return the remainder of the epoch after `consumed` samples, or after `num_skipped` steps if that is not 0.

        The first window, which contains the samples of one update, begins right after the `consumed` samples.

        Args:
            order: Order of the epoch's samples.
            consumed: Number of non-padding samples after which to start. Default: 0.
            num_skipped: Number of batches per rank after which to start. Default: 0.
        """
        windows = self._iterate_windows(order, consumed if not num_skipped else 0)
        rounds = (part for window in windows for part in self._iterate_rounds(window))
        if num_skipped:
            consumed = sum(map(len, islice(rounds, num_skipped)))
        return EpochStart(consumed, [], rounds)

    def _iterate_windows(self, order: Sequence[object] | Iterator[object], consumed: int) -> Iterator[Sequence[Any]]:
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

    def _iterate_rounds(self, window: Sequence[object]) -> Iterator[Sequence[Any]]:
        number = self._num_in(len(window))
        return (window[_slice_part(len(window), k, number)] for k in range(number))

    def get_share(self, samples: Sequence[T], rank: int, opening: list[T]) -> tuple[list[T], tuple[int, ...]]:
        """Return the samples of `rank` in one step, and the number of non-padding samples of every rank.

        A rank without samples gets the first sample of the step as padding.

        Args:
            samples: Samples of the step on all ranks.
            rank: Rank whose samples are returned.
            opening: Unused.
        """
        parts = [_slice_part(len(samples), r, self.count) for r in range(self.count)]
        return convert_to_list(samples[parts[rank]]) or convert_to_list(samples[:1]), tuple(
            each.stop - each.start for each in parts
        )

    def find_offset(self, samples: Sequence[Any], rank: int) -> int:
        """Return the index of the first sample of `rank` within the samples of one step.

        Args:
            samples: Samples of the step on all ranks.
            rank: Rank whose first sample is located.
        """
        return rank * len(samples) // self.count


def _slice_part(length: int, index: int, count: int) -> slice:
    """Return the slice of a sequence that is part `index` of `count` consecutive parts of nearly equal size.

    The sizes of the parts differ by at most one.

    Args:
        length: Length of the sequence.
        index: Index of the part.
        count: Number of parts.
    """
    return slice(index * length // count, (index + 1) * length // count)
