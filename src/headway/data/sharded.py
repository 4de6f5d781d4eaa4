"""Streams of which every rank reads its own shards: the ranks agree on each round, so that none runs dry alone.

Hugging Face `datasets.IterableDataset` with at least as many shards as ranks is read so. Ranks may hold different
amounts of data; one small exchange a round, one round ahead, tells all ranks all counts and the end. A rank that has
run out yields batches of no real rows until the others are done too.
"""

from collections.abc import Iterator
from typing import Any

from headway.data.feed import UNCOUNTABLE
from headway.data.stream import Piece, copy_containers
from headway.errors import DataError
from headway.ops.collectives import Collectives
from headway.ops.tree import map_tensors


def is_shardable(dataset: Any, count: int) -> bool:
    """Can every one of `count` ranks read shards of its own?"""
    num_shards = getattr(dataset, "num_shards", None)
    return (
        count > 1 and isinstance(num_shards, int) and num_shards >= count and callable(getattr(dataset, "shard", None))
    )


class Agreement:
    """Turns one rank's pieces into rounds that all ranks take part in.

    Args:
        collectives: the ranks.
        drop_last: end with the first round in which a rank has no batch.
    """

    def __init__(self, collectives: Collectives, drop_last: bool) -> None:
        self._collectives = collectives
        self._drop_last = drop_last
        self._spare: Piece | None = None

    def __call__(self, pieces: Iterator[Piece]) -> Iterator[tuple[Piece, bool]]:
        """Each round's piece with whether it is the last round."""
        current = self._agree(next(pieces, None))
        while current is not None:
            following = self._agree(next(pieces, None))
            yield current, following is None
            current = following

    def _agree(self, piece: Piece | None) -> Piece | None:
        if piece is not None and piece.batches:
            # The loop may change the batch it gets (e.g. pop a key): the spare has containers of its own.
            self._spare = piece._replace(batches=copy_containers(piece.batches))
        rows = self._collectives.gather_numbers([*_count(piece), self._spare is not None])
        has_piece = [row[0] >= 0 for row in rows]
        if not any(has_piece) or (self._drop_last and not all(has_piece)):
            self._spare = None
            return None
        sources = [rank for rank, row in enumerate(rows) if row[2]]
        if not all(has_piece) and 0 < len(sources) < len(rows):
            self._send_spare(sources[0])
        mine = piece if piece is not None else self._spare
        if mine is None:  # without any spare this round is one of those that are skipped on resuming
            return Piece([], [], int(sum(max(0, row[1]) for row in rows)))
        counts = tuple(max(0, int(row[0])) for row in rows)
        num_samples = int(sum(max(0, row[1]) for row in rows))
        shares = [share._replace(valid_counts=counts, num_samples=num_samples) for share in mine.shares]
        return Piece(
            mine.batches if piece is not None else copy_containers(mine.batches), shares, num_samples, mine.state
        )

    def _send_spare(self, source: int) -> None:
        """Give ranks whose shards held nothing at all a batch to copy."""
        spare = self._spare
        given = None if spare is None else spare._replace(batches=compact(spare.batches), state=None)
        given = self._collectives.broadcast_object(given, source)
        self._spare = given if spare is None else spare


def _count(piece: Piece | None) -> tuple[int, int]:
    """Real rows and samples; -1 real rows where there is no piece."""
    if piece is None:
        return -1, 0
    if not piece.batches:
        return 0, piece.num_samples
    counts = piece.shares[0].valid_counts
    if counts is None:
        raise DataError(UNCOUNTABLE.format(what="an item"))
    return counts[0], piece.num_samples


def compact(tree: Any) -> Any:
    """The tree with tensors that own no more memory than they show: pickling a view would send all it looks into."""
    return map_tensors(
        lambda tensor: tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor, tree
    )
