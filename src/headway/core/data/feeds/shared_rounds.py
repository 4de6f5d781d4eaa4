"""Exchange row counts in each step if each rank reads different shards of a dataset, so that all ranks end together.

In one step (also called round), every rank gets one batch. Ranks can have different amounts of data. So they exchange
their row counts one step ahead. A rank whose shards are exhausted yields padding until all shards are exhausted.
"""

from collections.abc import Iterator
from typing import NamedTuple

from headway.core.data.feeds.protocol import UNCOUNTABLE
from headway.core.data.feeds.stream import CollatedStep
from headway.core.data.sampling.shard import mark_last
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.collectives.tree import copy_containers, copy_views
from headway.errors import DataError

_NO_BATCH = -1
"""Number that a rank sends instead of its row count if it has no data left."""
_UNCOUNTABLE_ROWS = -2
"""Number that a rank sends instead of its row count if the rows of its item cannot be counted. All ranks then raise."""


class RoundCounts(NamedTuple):
    """Numbers that one rank sends to the other ranks in a step.

    Attributes:
        num_rows: Number of non-padding rows of the rank's batch; 0 if the step is skipped. `_NO_BATCH` or
            `_UNCOUNTABLE_ROWS` if there is no such number.
        num_samples: Number of samples that the rank read.
        has_spare: 1 if the rank has a batch that can be used as padding, else 0.
    """

    num_rows: int
    num_samples: int
    has_spare: int

    @property
    def has_batch(self) -> bool:
        """Whether the rank's data is not exhausted."""
        return self.num_rows >= 0


class SharedRounds:
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
        self._spare: CollatedStep | None = None

    def __call__(self, parts: Iterator[CollatedStep]) -> Iterator[tuple[CollatedStep, bool]]:
        """Return an iterator over pairs of (this rank's collated batch, whether it belongs to the last step).

        All ranks must iterate together.

        Args:
            parts: Collated batches of this rank, one item per step.

        Raises:
            DataError: If the rows of a rank's batch cannot be counted. The iterator raises it on all ranks.
        """
        return mark_last(self._exchange_rounds(parts))

    def _exchange_rounds(self, parts: Iterator[CollatedStep]) -> Iterator[CollatedStep]:
        while (part := self._exchange_counts(next(parts, None))) is not None:
            yield part

    def _exchange_counts(self, part: CollatedStep | None) -> CollatedStep | None:
        if part is not None and part.batches:
            # The training loop may modify its batch (e.g. pop a key), so copy the containers of the spare batch.
            self._spare = part._replace(batches=copy_containers(part.batches))
        gathered = self._collectives.gather_numbers(_count_part(part, self._spare is not None))
        ranks = [RoundCounts(*map(int, numbers)) for numbers in gathered]
        uncountable = [rank for rank, counts in enumerate(ranks) if counts.num_rows == _UNCOUNTABLE_ROWS]
        if uncountable:
            raise DataError(UNCOUNTABLE.format(what=f"an item of rank {uncountable[0]}"))
        has_batch = [counts.has_batch for counts in ranks]
        if not any(has_batch) or (self._drop_last and not all(has_batch)):
            self._spare = None
            return None
        sources = [rank for rank, counts in enumerate(ranks) if counts.has_spare]
        if not all(has_batch) and 0 < len(sources) < len(ranks):
            self._send_spare(sources[0])
        num_samples = sum(counts.num_samples for counts in ranks)
        mine = part if part is not None else self._spare
        if mine is None:  # there is no spare batch yet, because all rounds so far were skipped to resume a pass
            return CollatedStep([], [], num_samples)
        valid_counts = tuple(max(0, counts.num_rows) for counts in ranks)
        shares = [share._replace(valid_counts=valid_counts, num_samples=num_samples) for share in mine.shares]
        batches = mine.batches if part is not None else copy_containers(mine.batches)
        return CollatedStep(batches, shares, num_samples, mine.state)

    def _send_spare(self, source: int) -> None:
        """Send one batch from rank `source` to the ranks that have none, which use copies of it as padding.

        Args:
            source: Rank that has a batch.
        """
        spare = self._spare
        given = None if spare is None else spare._replace(batches=copy_views(spare.batches), state=None)
        given = self._collectives.broadcast_object(given, source)
        self._spare = given if spare is None else spare


def _count_part(part: CollatedStep | None, has_spare: bool) -> RoundCounts:
    """Return the numbers to send for one step.

    Args:
        part: Collated batch of the rank; None if the rank has no data left.
        has_spare: Whether the rank has a batch that can be used as padding.
    """
    if part is None:
        return RoundCounts(_NO_BATCH, 0, has_spare)
    if not part.batches:
        return RoundCounts(0, part.num_samples, has_spare)
    counts = part.shares[0].valid_counts
    return RoundCounts(_UNCOUNTABLE_ROWS if counts is None else counts[0], part.num_samples, has_spare)
