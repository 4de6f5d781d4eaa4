"""Index arithmetic that assigns samples to ranks at each step, and counts those that are not padding.

An epoch is divided into steps. In one step, every rank gets one batch. All ranks do the same arithmetic over the same
order, so each knows the row counts of all others without an exchange. Rows that are added only to complete a batch are
padding. They come last in a batch and are not counted. All ranks have the same number of steps. Ranks that read the same
data shard, such as those of a tensor-parallel group, count as one rank in this module.

After a resume with a different world size, the number of samples per update might not be a multiple of the samples per
step. `UpdateSplit` then divides the order into updates, an update into steps, and a step among the ranks as evenly as
possible. Nothing is repeated to fill batches, so that every update uses the same samples as before.
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


class UpdateSize(NamedTuple):
    """Size of a gradient update.

    Attributes:
        num_samples: Number of samples per update over all ranks; 0 for the size that results from the batch size.
        num_steps: Number of steps per update. In each step, every rank gets one batch.
    """

    num_samples: int
    num_steps: int


class RankBatch(NamedTuple):
    """Description of one rank's samples in one step, with row counts.

    Attributes:
        indices: Indices that the rank fetches, padding last; empty if an iterable dataset was read.
        num_rows: Number of rows in the rank's batch, including padding; None if its rows cannot be counted.
        valid_counts: Number of non-padding rows in the batch of each data shard, indexed by shard; None if unknown.
        num_samples: Number of non-padding samples in the step over all ranks, by which the position in the epoch
            advances. If the loader does not batch, the dataset's items are counted.
        is_last: Whether this is the last step of the epoch.
    """

    indices: list[Any]
    num_rows: int | None
    valid_counts: tuple[int, ...] | None
    num_samples: int
    is_last: bool


class EpochRemainder(NamedTuple):
    """Remainder of an epoch after a starting point.

    Attributes:
        num_consumed: Number of non-padding samples before the starting point.
        first_items: First items of the complete epoch, used as padding for the last step; empty in an `UpdateSplit`.
            An item is a sample (or its index) or, in a `BatchSplit`, a batch of indices.
        steps: Iterator over the remaining steps. Each element contains the items of one step on all ranks.
    """

    num_consumed: int
    first_items: list[Any]
    steps: Iterator[Any]


@dataclass(frozen=True)
class SampleSplit:
    """Split of an epoch's order into steps of `samples_per_rank * num_ranks` consecutive samples.

    In one step, every rank gets one batch: rank r gets the r-th chunk of `samples_per_rank` samples.

    Attributes:
        samples_per_rank: Number of samples per rank and step.
        num_ranks: Number of ranks, which is the number of data shards.
        drop_last: Whether to leave out an incomplete last step.
        even_batches: Whether to complete the last step with samples from the start of the order.
        spreads_last_step: Whether to divide the samples of an incomplete step evenly among the ranks, as shorter
            batches. Otherwise the first ranks get full batches. No effect on a step that is completed.
    """

    samples_per_rank: int
    num_ranks: int
    drop_last: bool = False
    even_batches: bool = True
    spreads_last_step: bool = False

    @cached_property
    def samples_per_step(self) -> int:
        """Number of samples that all ranks together get in a full step."""
        return self.samples_per_rank * self.num_ranks

    @cached_property
    def _full_counts(self) -> tuple[int, ...]:
        return (self.samples_per_rank,) * self.num_ranks

    def count_steps(self, num_samples: int) -> int:
        """Return the number of steps in an epoch of `num_samples` samples. In each step, every rank gets one batch."""
        return num_samples // self.samples_per_step if self.drop_last else -(-num_samples // self.samples_per_step)

    def split_epoch(
        self, order: Sequence[Any] | Iterator[Any], num_consumed: int = 0, num_skipped_steps: int = 0
    ) -> EpochRemainder:
        """Return the remainder of the epoch after `num_consumed` samples, or after `num_skipped_steps` if that is not 0.

        Args:
            order: Order of the epoch's samples. A sequence is sliced. An iterator is read up to the starting point.
            num_consumed: Number of non-padding samples after which to start. Default: 0.
            num_skipped_steps: Number of batches per rank after which to start. Default: 0.
        """
        size = self.samples_per_step
        start = num_skipped_steps * size if num_skipped_steps else num_consumed
        steps: Iterator[Any]
        if isinstance(order, Iterator):
            first_items = list(islice(order, size))
            samples_after_start = islice(chain(first_items, order), start, None)
            steps = iter(lambda: list(islice(samples_after_start, size)), [])
            if self.drop_last:
                steps = (samples for samples in steps if len(samples) == size)
        else:
            first_items = convert_to_list(order[:size])
            start = min(start, len(order))
            end = len(order)
            if self.drop_last:
                end -= (end - start) % size
            steps = _iterate_slices(order, start, end, size)
        return EpochRemainder(start, first_items, steps)

    def get_rank_samples(
        self, samples: Sequence[T], rank: int, first_items: list[T]
    ) -> tuple[list[T], tuple[int, ...]]:
        """Return the samples of `rank` in one step, and the number of non-padding samples of every rank.

        An incomplete step is padded if `even_batches`. Otherwise only a rank without samples gets padding: the samples
        of rank 0.

        Args:
            samples: Samples of the step on all ranks.
            rank: Rank whose samples are returned.
            first_items: First samples of the epoch, used as padding for an incomplete step.
        """
        if len(samples) == self.samples_per_step:
            size = self.samples_per_rank
            return convert_to_list(samples[rank * size : (rank + 1) * size]), self._full_counts
        size = self._count_samples_per_rank(samples)
        counts = tuple(min(max(len(samples) - each * size, 0), size) for each in range(self.num_ranks))
        begin, end = rank * size, (rank + 1) * size
        real_samples = convert_to_list(samples)
        if self.even_batches:
            return fill_by_cycling(real_samples, first_items, size * self.num_ranks)[begin:end], counts
        return real_samples[begin:end] or real_samples[:size], counts

    def _count_samples_per_rank(self, samples: Sequence[Any]) -> int:
        """Return the largest number of samples that a rank gets in a step with the given samples."""
        if not self.spreads_last_step:
            return self.samples_per_rank
        return min(self.samples_per_rank, -(-len(samples) // self.num_ranks))

    def find_first_index(self, samples: Sequence[Any], rank: int) -> int:
        """Return the index of the first sample of `rank` within the samples of one step.

        If the rank has no samples, the index can be beyond the end of the samples.

        Args:
            samples: Samples of the step on all ranks.
            rank: Rank whose first sample is located.
        """
        return rank * self._count_samples_per_rank(samples)


@dataclass(frozen=True)
class BatchSplit:
    """Split of a custom batch sampler's batches among the ranks. These batches may differ in size.

    In one step, every rank gets one batch.

    Attributes:
        num_ranks: Number of ranks, which is the number of data shards.
        splits_batches: Whether each batch of the sampler is split among the ranks. Otherwise each rank gets a whole one.
        drop_last: Whether to leave out an incomplete last step. No effect if batches are split.
        even_batches: Whether to complete the last step with batches from the start of the order.
        batch_size: Number of samples in a full batch of the sampler; None if batches have no common size. A shorter batch
            is completed to this size if `even_batches` is set and batches are not split.
    """

    num_ranks: int
    splits_batches: bool = False
    drop_last: bool = False
    even_batches: bool = True
    batch_size: int | None = None

    @property
    def samples_per_step(self) -> int | None:
        """Number of samples that all ranks together get in a full step; None if batches differ in size."""
        return None if self.batch_size is None else self.batch_size * self._batches_per_step

    @property
    def _batches_per_step(self) -> int:
        return 1 if self.splits_batches else self.num_ranks

    def count_steps(self, num_batches: int) -> int:
        """Return the number of steps in an epoch for which the batch sampler yields `num_batches` batches."""
        return num_batches // self._batches_per_step if self.drop_last else -(-num_batches // self._batches_per_step)

    def split_epoch(
        self, order: Iterable[Sequence[Any]], num_consumed: int = 0, num_skipped_steps: int = 0
    ) -> EpochRemainder:
        """Return the remainder of the epoch after `num_consumed` samples, or after `num_skipped_steps` if that is not 0.

        The samples of a batch that contains the starting point are read from there on, so that batch becomes shorter.

        Args:
            order: Batches of the epoch, as the batch sampler yields them.
            num_consumed: Number of non-padding samples after which to start. Default: 0.
            num_skipped_steps: Number of batches per rank after which to start. Default: 0.
        """
        # Copy, because a sampler may continue to use the list that it yielded.
        batches: Iterator[list[Any]] = map(list, order)
        first_items = list(islice(batches, self.num_ranks))
        batches = chain(first_items, batches)
        if num_skipped_steps:
            num_consumed = sum(map(len, islice(batches, num_skipped_steps * self._batches_per_step)))
        else:
            batches = _drop_samples(batches, num_consumed)
        steps = iter(lambda: list(islice(batches, self._batches_per_step)), [])
        if self.drop_last:
            steps = (step for step in steps if len(step) == self._batches_per_step)
        return EpochRemainder(num_consumed, first_items, steps)

    def get_rank_samples(
        self, batches: list[list[Any]], rank: int, first_items: list[list[Any]]
    ) -> tuple[list[Any], tuple[int, ...]]:
        """Return the samples of `rank` in one step, and the number of non-padding samples of every rank.

        Short batches and missing batches are padded if `even_batches`. Otherwise only a rank without samples gets
        padding: the samples of rank 0.

        Args:
            batches: Batches of the step, as the batch sampler yields them. With `splits_batches`, there is exactly one.
            rank: Rank whose samples are returned.
            first_items: First batches of the epoch, used as padding for an incomplete step.
        """
        samples_by_rank = self._split_by_rank(batches)
        counts = tuple(map(len, samples_by_rank))
        samples = samples_by_rank[rank]
        if not self.even_batches:
            return samples or samples_by_rank[0], counts
        if self.splits_batches:
            return fill_by_cycling(samples, list(chain(*first_items)), len(samples_by_rank[0])), counts
        # Ranks without a batch get the epoch's first batches, round-robin.
        samples = samples or first_items[(rank - len(batches)) % len(first_items)]
        return fill_by_cycling(samples, list(chain(*first_items)), self.batch_size or 0), counts

    def find_first_index(self, batches: list[list[Any]], rank: int) -> int:
        """Return the index of the first sample of `rank` within the samples of one step on all ranks.

        Args:
            batches: Batches of the step, as the batch sampler yields them.
            rank: Rank whose first sample is located.
        """
        return sum(map(len, self._split_by_rank(batches)[:rank]))

    def _split_by_rank(self, batches: list[list[Any]]) -> list[list[Any]]:
        """Return the samples of each rank in one step. The lists of the last ranks can be empty."""
        if not self.splits_batches:
            return batches + [[]] * (self.num_ranks - len(batches))
        (batch,) = batches
        size = -(-len(batch) // self.num_ranks)
        return [batch[rank * size : (rank + 1) * size] for rank in range(self.num_ranks)]


@dataclass(frozen=True)
class UpdateSplit:
    """Split of an epoch's order into updates of `samples_per_update` samples, and of each update into steps.

    In one step, every rank gets one batch. The batches of an update differ in size by as little as possible.

    Attributes:
        samples_per_update: Number of samples per gradient update over all ranks.
        steps_per_update: Number of steps in a full update. At most `samples_per_update`.
        num_ranks: Number of ranks, which is the number of data shards.
        drop_multiple: An incomplete last update is truncated to a multiple of this number of samples. Default: 1, which
            keeps all of them.
        even_batches: No effect. In a step with fewer samples than ranks, each rank without samples gets one sample as
            padding.
    """

    samples_per_update: int
    steps_per_update: int
    num_ranks: int
    drop_multiple: int = 1
    even_batches: bool = True

    @property
    def drop_last(self) -> bool:
        """Whether samples of an incomplete last update may be dropped."""
        return self.drop_multiple > 1

    @property
    def samples_per_step(self) -> int | None:
        """Number of samples that all ranks together get per step; None if it varies."""
        return self.samples_per_update if self.steps_per_update == 1 else None

    def count_steps(self, num_samples: int) -> int:
        """Return the number of steps in an epoch of `num_samples` samples. In each step, every rank gets one batch."""
        num_full_updates, num_left = divmod(num_samples, self.samples_per_update)
        num_left -= num_left % self.drop_multiple
        return num_full_updates * self.steps_per_update + self._count_update_steps(num_left)

    def _count_update_steps(self, num_samples: int) -> int:
        """Return the number of steps in an update of `num_samples` samples, which can be an incomplete last one."""
        if num_samples == self.samples_per_update:
            return self.steps_per_update
        most_samples_per_step = -(-self.samples_per_update // self.steps_per_update)
        return -(-num_samples // most_samples_per_step)

    def split_epoch(
        self, order: Sequence[Any] | Iterator[Any], num_consumed: int = 0, num_skipped_steps: int = 0
    ) -> EpochRemainder:
        """Return the remainder of the epoch after `num_consumed` samples, or after `num_skipped_steps` if that is not 0.

        The first update begins right after the `num_consumed` samples.

        Args:
            order: Order of the epoch's samples. A sequence is sliced. An iterator is read up to the starting point.
            num_consumed: Number of non-padding samples after which to start. Default: 0.
            num_skipped_steps: Number of batches per rank after which to start. Default: 0.
        """
        updates = self._iterate_updates(order, 0 if num_skipped_steps else num_consumed)
        steps = (step for update in updates for step in self._iterate_steps(update))
        if num_skipped_steps:
            num_consumed = sum(map(len, islice(steps, num_skipped_steps)))
        return EpochRemainder(num_consumed, [], steps)

    def _iterate_updates(self, order: Sequence[object] | Iterator[object], start: int) -> Iterator[Sequence[Any]]:
        """Yield the samples of each update after the first `start` samples of the order."""
        size = self.samples_per_update
        updates: Iterator[Sequence[Any]]
        if isinstance(order, Iterator):
            samples_after_start = islice(order, start, None)
            updates = iter(lambda: list(islice(samples_after_start, size)), [])
        else:
            updates = (order[begin : begin + size] for begin in range(start, len(order), size))
        for update in updates:
            num_samples = len(update)
            if num_samples < size:
                num_samples -= num_samples % self.drop_multiple
            if num_samples:
                yield update[:num_samples]

    def _iterate_steps(self, update: Sequence[object]) -> Iterator[Sequence[Any]]:
        """Return an iterator over the steps of an update, each of which is a slice of its samples."""
        num_steps = self._count_update_steps(len(update))
        return (update[_slice_part(len(update), step, num_steps)] for step in range(num_steps))

    def get_rank_samples(
        self, samples: Sequence[T], rank: int, first_items: list[T]
    ) -> tuple[list[T], tuple[int, ...]]:
        """Return the samples of `rank` in one step, and the number of non-padding samples of every rank.

        A rank without samples gets the first sample of the step as padding.

        Args:
            samples: Samples of the step on all ranks.
            rank: Rank whose samples are returned.
            first_items: Unused.
        """
        slices = [_slice_part(len(samples), each, self.num_ranks) for each in range(self.num_ranks)]
        counts = tuple(each.stop - each.start for each in slices)
        return convert_to_list(samples[slices[rank]]) or convert_to_list(samples[:1]), counts

    def find_first_index(self, samples: Sequence[Any], rank: int) -> int:
        """Return the index of the first sample of `rank` within the samples of one step.

        Args:
            samples: Samples of the step on all ranks.
            rank: Rank whose first sample is located.
        """
        return rank * len(samples) // self.num_ranks


def mark_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yield pairs of (item, whether it is the last one), by reading one item ahead."""
    iterator = iter(items)
    try:
        current = next(iterator)
    except StopIteration:  # no items
        return
    for following in iterator:
        yield current, False
        current = following
    yield current, True


def convert_to_list(samples: Sequence[T]) -> list[T]:
    """Return the samples as a list. An array's elements become Python numbers, and a list is returned unchanged."""
    if type(samples) is list:
        return samples
    to_list = getattr(samples, "tolist", None)
    return to_list() if to_list is not None else list(samples)


def fill_by_cycling(samples: list[T], padding: list[T], size: int) -> list[T]:
    """Return `samples` extended to `size` elements with elements of `padding`, which is repeated as often as needed.

    If `samples` is long enough, it is returned unchanged. Otherwise the result is a new list.

    Args:
        samples: List to extend.
        padding: Elements to append.
        size: Minimum length of the result.
    """
    if len(samples) >= size:
        return samples
    return samples + list(islice(cycle(padding), size - len(samples)))


def _iterate_slices(order: Sequence[T], begin: int, end: int, size: int) -> Iterator[Sequence[T]]:
    """Return an iterator over consecutive slices of `order[begin:end]` with `size` items each.

    The last slice can be shorter.

    Args:
        order: Order of an epoch's samples.
        begin: Index of the first item.
        end: Index after the last item.
        size: Number of items in a slice.
    """
    starts = range(begin, end, size)
    stops = range(begin + size, end + size, size)
    # Maps run in C. A generator would be one more Python frame for each batch.
    return map(order.__getitem__, map(slice, starts, stops))


def _drop_samples(batches: Iterator[list[Any]], num_samples: int) -> Iterator[list[Any]]:
    """Yield the batches without the first `num_samples` samples. The first batch that is yielded can be shorter."""
    num_left = num_samples
    for batch in batches:
        if num_left < len(batch):
            yield batch[num_left:]
            break
        num_left -= len(batch)
    yield from batches


def _slice_part(length: int, index: int, count: int) -> slice:
    """Return the slice of a sequence that is part `index` of `count` consecutive parts of nearly equal size.

    The sizes of the parts differ by at most one.

    Args:
        length: Length of the sequence.
        index: Index of the part.
        count: Number of parts.
    """
    return slice(index * length // count, (index + 1) * length // count)
