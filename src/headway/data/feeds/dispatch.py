"""One process reads for all: the main process reads each round and hands every rank its batch.

Only where `dispatch_batches=True` asks for it: data that only one process can reach. Each rank's batch travels as it
was collated, so batches may differ in shape, nesting and type; counts and the end travel with it. An error while
reading reaches every rank.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from headway.data.feeds.feed import UNCOUNTABLE, BatchFeed, Delivery, State
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

    @property
    def round_size(self) -> int | None:
        """Samples that all ranks together get per step."""
        return self._feed.round_size

    @property
    def step_size(self) -> int | None:
        """The same by the loader's own settings."""
        return self._feed.step_size

    def fits_window(self, window: int, num_rounds: int) -> bool:
        """Can `window` samples be given out in so many rounds?"""
        return self._feed.fits_window(window, num_rounds)

    def keep_window(self, window: int, num_rounds: int, unit: int) -> None:
        """Give them out so from the next pass on; a window of 0: as the loader says."""
        self._feed.keep_window(window, num_rounds, unit)
        if self._length is not None:
            self._length = self._collectives.broadcast_object(len(self._feed))

    @property
    def inner(self) -> DataLoader[Any]:
        """The torch loader that reads, on the main process."""
        return self._feed.inner

    def __len__(self) -> int:
        return len(self._feed) if self._length is None else self._length

    def open(self) -> None:
        """Every rank draws, so that their streams move on alike."""
        self._feed.open()

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

    def follow(self, epoch: int) -> None:
        """Nothing: a dispatching feed reads itself."""
        self._feed.follow(epoch)

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
            real = [
                num if (share.valid_counts or ())[rank] else 0 for rank, (num, share) in enumerate(zip(rows, shares))
            ]
            counts = tuple(num or 0 for num in real)
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

    def state(self, is_running: bool) -> State:
        """What the main process needs to resume."""
        return self._feed.state(is_running)

    def left(self) -> State:
        """What the next pass needs of one that was left."""
        return self._feed.left()

    def mark(self) -> State:
        """The same, as of a batch that the pass may go back to."""
        return self._feed.mark()

    def load_state(self, state: State) -> None:
        """Let the main process go on from that."""
        self._feed.load_state(state)


class Failure(str):
    """Tells the other ranks that reading failed: the error's text."""
