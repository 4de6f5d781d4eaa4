"""Exchange row counts in each step if each rank reads different shards of a dataset, so that all ranks end together.

In one step, every rank gets one batch. Ranks can have different amounts of data. So they exchange their row counts one
step ahead. A rank whose shards are exhausted yields padding until all shards are exhausted.
"""

from collections.abc import Iterator
from typing import NamedTuple

from headway.core.data.feeds.protocol import UNCOUNTABLE
from headway.core.data.feeds.stream_collate import CollatedStep
from headway.core.data.sampling.shard import mark_last
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.collectives.tree import copy_containers, copy_views
from headway.errors import DataError

_NO_BATCH = -1
"""Number that a rank sends instead of its row count if it has no data left."""
_UNCOUNTABLE_ROWS = -2
"""Number that a rank sends instead of its row count if the rows of its item cannot be counted. All ranks then raise."""


class StepCounts(NamedTuple):
    """Numbers that one rank sends to the other ranks in a step.

    Attributes:
        num_rows: Number of non-padding rows of the rank's batch; 0 if the step is skipped. `_NO_BATCH` or
            `_UNCOUNTABLE_ROWS` if there is no such number.
        num_samples: Number of samples that the rank read. If the loader does not batch, the dataset's items are counted.
        has_padding: 1 if the rank has an earlier or current batch that can be used as padding, else 0.
    """

    num_rows: int
    num_samples: int
    has_padding: int

    @property
    def has_batch(self) -> bool:
        """Whether the rank's data is not exhausted."""
        return self.num_rows >= 0


class RowCountExchange:
    """Callable that gives all ranks the same number of steps when each rank reads different shards of a dataset.

    It wraps the iterator over a rank's batches. In each step, the ranks exchange their row counts. A rank whose
    shards are exhausted yields padding until the shards of all ranks are exhausted.

    Args:
        collectives: Collectives of the ranks.
        drop_last: Whether to end at the first step for which some rank has no batch.
    """

    def __init__(self, collectives: Collectives, drop_last: bool) -> None:
        self._collectives = collectives
        self._drop_last = drop_last
        self._padding: CollatedStep | None = None

    def __call__(self, collated_steps: Iterator[CollatedStep]) -> Iterator[tuple[CollatedStep, bool]]:
        """Return an iterator over pairs of (this rank's collated batch, whether it belongs to the last step).

        All ranks must iterate together.

        Args:
            collated_steps: Collated batches of this rank, one item per step.

        Raises:
            DataError: If the rows of a rank's batch cannot be counted. The iterator raises it on all ranks.
        """
        return mark_last(self._exchange_steps(collated_steps))

    def _exchange_steps(self, collated_steps: Iterator[CollatedStep]) -> Iterator[CollatedStep]:
        """Yield the steps with the row counts of all ranks, until all ranks' data has ended, or any rank's with drop_last."""
        while (collated := self._exchange_counts(next(collated_steps, None))) is not None:
            yield collated

    def _exchange_counts(self, collated: CollatedStep | None) -> CollatedStep | None:
        """Exchange the counts of one step, and return this rank's batch with the row counts of all ranks.

        Args:
            collated: Collated batch of this rank; None if its shards are exhausted.

        Returns:
            Batch of this rank, which is padding if its shards are exhausted. None if no step is left.

        Raises:
            DataError: On all ranks, if the rows of a rank's batch cannot be counted.
        """
        if collated is not None and collated.batches:
            # The training loop may modify its batch (e.g. pop a key), so copy the containers of the padding batch.
            self._padding = collated._replace(batches=copy_containers(collated.batches))
        gathered = self._collectives.gather_numbers(_make_counts(collated, self._padding is not None))
        counts_by_rank = [StepCounts(*map(int, numbers)) for numbers in gathered]
        for rank, counts in enumerate(counts_by_rank):
            if counts.num_rows == _UNCOUNTABLE_ROWS:
                raise DataError(UNCOUNTABLE.format(what=f"an item of rank {rank}"))
        has_batch = [counts.has_batch for counts in counts_by_rank]
        if not any(has_batch) or (self._drop_last and not all(has_batch)):
            self._padding = None
            return None
        ranks_with_padding = [rank for rank, counts in enumerate(counts_by_rank) if counts.has_padding]
        if not all(has_batch) and 0 < len(ranks_with_padding) < len(counts_by_rank):
            self._broadcast_padding(ranks_with_padding[0])
        num_samples = sum(counts.num_samples for counts in counts_by_rank)
        step = self._padding if collated is None else collated
        if step is None:  # there is no padding batch yet, because all steps so far were skipped to resume a pass
            return CollatedStep([], [], num_samples)
        valid_counts = tuple(max(0, counts.num_rows) for counts in counts_by_rank)
        rank_batches = [
            rank_batch._replace(valid_counts=valid_counts, num_samples=num_samples) for rank_batch in step.rank_batches
        ]
        batches = copy_containers(step.batches) if collated is None else step.batches
        return CollatedStep(batches, rank_batches, num_samples, step.state)

    def _broadcast_padding(self, source: int) -> None:
        """Send a padding batch from rank `source` to the ranks that have none. All ranks must call this method.

        Args:
            source: Rank that has a padding batch.
        """
        sent = None
        if self._padding is not None:
            sent = self._padding._replace(batches=copy_views(self._padding.batches), state=None)
        received = self._collectives.broadcast_object(sent, source)
        if self._padding is None:
            self._padding = received


def _make_counts(collated: CollatedStep | None, has_padding: bool) -> StepCounts:
    """Return the numbers that a rank sends for one step.

    Args:
        collated: Collated batch of the rank; None if the rank has no data left.
        has_padding: Whether the rank has a batch that can be used as padding.
    """
    if collated is None:
        return StepCounts(_NO_BATCH, 0, has_padding)
    if not collated.batches:
        return StepCounts(0, collated.num_samples, has_padding)
    counts = collated.rank_batches[0].valid_counts
    num_rows = _UNCOUNTABLE_ROWS if counts is None else counts[0]
    return StepCounts(num_rows, collated.num_samples, has_padding)
