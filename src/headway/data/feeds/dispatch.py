"""One process reads for all: the main process reads each round and hands every rank its batch.

Only where `dispatch_batches=True` asks for it: data that only one process can reach. Each rank's batch travels as it
was collated, so batches may differ in shape, nesting and type; counts and the end travel with it. An error while
reading reaches every rank.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from headway.data.feeds import UNCOUNTABLE, BatchFeed, Delivery
from headway.data.feeds.stream import compact
from headway.data.sampling.shard import ShardIndex
from headway.errors import DataError
from headway.runtime.collectives.checked import Collectives


class DispatchFeed:
    """Hands out what the main process reads.

    Args:
        feed: reads the batches of all ranks in turn; used on the main process only, but known on all for its lengths.
        collectives: all ranks.
        shard: this rank's part of the data; several ranks may have the same.
        is_batched: rows are known from the indices; False: items are batches, counted where they are read.
        length: batches of an epoch, as the main process knows it; None: unknown.
    """

    def __init__(
        self, feed: BatchFeed, collectives: Collectives, shard: ShardIndex, is_batched: bool, length: int | None
    ) -> None:
        self._feed, self._collectives, self._shard, self._is_batched = feed, collectives, shard, is_batched
        self._length = length

    def __getattr__(self, name: str) -> Any:
        """All else as the feed has it: sizes, windows, states; every rank draws, so that their streams move on alike."""
        if name.startswith("_"):  # asked for before there is a feed, as while unpickling
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._feed, name)

    @property
    def is_even(self) -> bool:
        """Are last rounds completed?"""
        return self._feed.is_even

    @is_even.setter
    def is_even(self, value: bool) -> None:
        self._feed.is_even = value

    @property
    def seed(self) -> int:
        """Of the order and of the workers' streams."""
        return self._feed.seed

    @seed.setter
    def seed(self, value: int) -> None:
        self._feed.seed = value

    def keep_window(self, window: int, num_rounds: int, unit: int) -> None:
        """Give them out so from the next pass on; a window of 0: as the loader says."""
        self._feed.keep_window(window, num_rounds, unit)
        if self._length is not None:
            self._length = self._collectives.broadcast_object(len(self._feed))

    def __len__(self) -> int:
        return len(self._feed) if self._length is None else self._length

    def start(self, epoch: int, consumed: int, num_skipped: int) -> tuple[int, Iterator[Delivery]]:
        """Begin a pass."""
        if self._collectives.rank != 0:
            self._feed.follow(epoch)
            return self._receive(None), self._follow()
        try:
            consumed, deliveries = self._feed.start(epoch, consumed, num_skipped)
        except Exception as error:
            self._report(error)
            raise
        return self._receive(consumed), self._lead(deliveries)

    def _lead(self, deliveries: Iterator[Delivery]) -> Iterator[Delivery]:
        while True:
            try:
                parts = self._complete(list(islice(deliveries, self._shard.count)))
            except Exception as error:
                self._report(error)
                raise
            self._receive([(compact(batch), share) for batch, share in parts])
            if not parts:
                return
            yield parts[self._shard.index]

    def _follow(self) -> Iterator[Delivery]:
        while parts := self._receive(None):
            yield parts[self._shard.index]

    def _complete(self, parts: list[Delivery]) -> list[Delivery]:
        """The parts without their indices, and with counts of rows where items were counted."""
        shares = [share._replace(indices=[]) for _, share in parts]
        if not self._is_batched:
            rows = [share.num_rows for share in shares]
            if None in rows:
                raise DataError(UNCOUNTABLE.format(what=f"the item for rank {rows.index(None)}"))
            is_real = [(share.valid_counts or ())[rank] > 0 for rank, share in enumerate(shares)]
            counts = tuple((num or 0) if real else 0 for num, real in zip(rows, is_real))
            shares = [share._replace(valid_counts=counts) for share in shares]
        return [(batch, share) for (batch, _), share in zip(parts, shares)]

    def _receive(self, value: object) -> Any:
        """The main process's `value`, on every rank."""
        value = self._collectives.broadcast_object(value)
        if isinstance(value, Failure):
            raise DataError(f"the main process failed while it read the data for all ranks: {value}; see its traceback")
        return value

    def _report(self, error: Exception) -> None:
        self._collectives.broadcast_object(Failure(f"{type(error).__name__}: {error}"))


class Failure(str):
    """Tells the other ranks that reading failed: the error's text."""
