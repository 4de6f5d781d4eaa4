"""Streams of which every rank reads its own shards: the ranks agree on each round, so that none runs dry alone.

Hugging Face `datasets.IterableDataset` with at least as many shards as ranks is read so. Ranks may hold different
amounts of data; one small exchange a round, one round ahead, tells all ranks all counts and the end. A rank that has
run out yields batches of no real rows until the others are done too.
"""

from collections.abc import Iterator
from typing import Any

from headway.data.feeds.feed import UNCOUNTABLE
from headway.data.feeds.stream import Collated, copy_containers
from headway.errors import DataError
from headway.runtime.collectives.checked import Collectives
from headway.runtime.collectives.tree import map_tensors


def is_shardable(dataset: object, count: int) -> bool:
    """Can every one of `count` ranks read shards of its own?"""
    num_shards = getattr(dataset, "num_shards", None)
    return (
        count > 1 and isinstance(num_shards, int) and num_shards >= count and callable(getattr(dataset, "shard", None))
    )


class SharedRounds:
    """Turns one rank's parts into rounds that all ranks take part in.

    Args:
        collectives: the ranks.
        drop_last: end with the first round in which a rank has no batch.
    """

    def __init__(self, collectives: Collectives, drop_last: bool) -> None:
        self._collectives = collectives
        self._drop_last = drop_last
        self._spare: Collated | None = None

    def __call__(self, parts: Iterator[Collated]) -> Iterator[tuple[Collated, bool]]:
        """Each round's part with whether it is the last round."""
        current = self._agree(next(parts, None))
        while current is not None:
            following = self._agree(next(parts, None))
            yield current, following is None
            current = following

    def _agree(self, part: Collated | None) -> Collated | None:
        if part is not None and part.batches:
            # The loop may change the batch it gets (e.g. pop a key): the spare has containers of its own.
            self._spare = part._replace(batches=copy_containers(part.batches))
        rows = self._collectives.gather_numbers([*_count(part), self._spare is not None])
        has_part = [row[0] >= 0 for row in rows]
        if not any(has_part) or (self._drop_last and not all(has_part)):
            self._spare = None
            return None
        sources = [rank for rank, row in enumerate(rows) if row[2]]
        if not all(has_part) and 0 < len(sources) < len(rows):
            self._send_spare(sources[0])
        mine = part if part is not None else self._spare
        if mine is None:  # without any spare this round is one of those that are skipped on resuming
            return Collated([], [], int(sum(max(0, row[1]) for row in rows)))
        counts = tuple(max(0, int(row[0])) for row in rows)
        num_samples = int(sum(max(0, row[1]) for row in rows))
        shares = [share._replace(valid_counts=counts, num_samples=num_samples) for share in mine.shares]
        return Collated(
            mine.batches if part is not None else copy_containers(mine.batches), shares, num_samples, mine.state
        )

    def _send_spare(self, source: int) -> None:
        """Give ranks whose shards held nothing at all a batch to copy."""
        spare = self._spare
        given = None if spare is None else spare._replace(batches=compact(spare.batches), state=None)
        given = self._collectives.broadcast_object(given, source)
        self._spare = given if spare is None else spare


def _count(part: Collated | None) -> tuple[int, int]:
    """Real rows and samples; -1 real rows where there is no part."""
    if part is None:
        return -1, 0
    if not part.batches:
        return 0, part.num_samples
    counts = part.shares[0].valid_counts
    if counts is None:
        raise DataError(UNCOUNTABLE.format(what="an item"))
    return counts[0], part.num_samples


def compact(tree: object) -> Any:
    """The tree with tensors that own no more memory than they show: pickling a view would send all it looks into."""
    return map_tensors(
        lambda tensor: tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor, tree
    )
