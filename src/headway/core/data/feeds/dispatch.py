"""Dispatching: the main process reads the data of all ranks and sends each rank its batch.

It is used with `dispatch_batches=True`, for data that only one process can reach. With Accelerate's rules, it is also
the default for iterable datasets. In one step, every rank gets one batch. Each rank's batch is sent as the collate
function returned it, so batches can differ in shape, nesting and type. A batch is sent together with its row counts and
a flag that marks the last step. If the main process fails to read, an error is raised on every rank.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from headway.core.data.feeds.protocol import UNCOUNTABLE, BatchFeed, Delivery
from headway.core.data.sampling.shard import ShardIndex
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.collectives.tree import copy_views
from headway.errors import DataError


class DispatchFeed:
    """`BatchFeed` for data that the main process reads for all ranks. It sends each rank its batch.

    Args:
        feed: `BatchFeed` that yields the batches of all ranks round-robin. Only the main process reads batches from it,
            but all ranks read its sizes, such as `samples_per_step`.
        collectives: Collectives of all ranks.
        shard: Data shard of this rank. Several ranks may have the same shard.
        is_batched: Whether torch's DataLoader builds the batches, so that their sizes are known from the indices.
            Otherwise each item of the dataset is a batch, and the main process counts its rows.
        num_batches: Number of batches per rank in an epoch, as counted by the main process; None if unknown.
    """

    def __init__(
        self, feed: BatchFeed, collectives: Collectives, shard: ShardIndex, is_batched: bool, num_batches: int | None
    ) -> None:
        self._feed = feed
        self._collectives = collectives
        self._shard = shard
        self._is_batched = is_batched
        self._num_batches = num_batches

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped `BatchFeed`, such as `samples_per_step` or `state`.

        Methods of the `BatchFeed` that draw random numbers therefore run on every rank, which keeps all ranks' RNG
        states equal.

        Raises:
            AttributeError: If `name` begins with "_", or the `BatchFeed` has no such attribute.
        """
        if name.startswith("_"):  # called before `__init__`, e.g. while unpickling
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._feed, name)

    @property
    def even_batches(self) -> bool:
        """Whether an incomplete last step is completed with repeated samples, so that every rank gets a full batch."""
        return self._feed.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._feed.even_batches = value

    @property
    def seed(self) -> int:
        """Seed of the sample order and of the workers' random numbers."""
        return self._feed.seed

    @seed.setter
    def seed(self, value: int) -> None:
        self._feed.seed = value

    def set_update_size(self, samples_per_update: int, num_steps: int, drop_multiple: int) -> None:
        """Use `samples_per_update` samples per gradient update from the next pass on. All ranks must call this method.

        Args:
            samples_per_update: Number of samples per update over all ranks; 0 to return to the user's settings.
            num_steps: Number of batches per rank and update.
            drop_multiple: With drop_last, an incomplete last update is truncated to a multiple of this number of
                samples.
        """
        self._feed.set_update_size(samples_per_update, num_steps, drop_multiple)
        if self._num_batches is not None:
            is_main = self._collectives.rank == 0
            self._num_batches = self._collectives.broadcast_object(len(self._feed) if is_main else None)

    def __len__(self) -> int:
        return len(self._feed) if self._num_batches is None else self._num_batches

    def start_pass(self, epoch: int, num_consumed: int, num_skipped_steps: int) -> tuple[int, Iterator[Delivery]]:
        """Start a pass: the main process reads and sends batches, and the other ranks receive them.

        Args:
            epoch: Number of the epoch.
            num_consumed: Number of non-padding samples after which to start.
            num_skipped_steps: If not 0, number of batches per rank after which to start. `num_consumed` is then
                ignored.

        Returns:
            Pair of (number of non-padding samples before the first batch, iterator over pairs of (batch, `RankBatch`)).

        Raises:
            DataError: On all ranks but the main process, if the main process fails to read. The main process raises its
                original error. The iterator raises these errors, too.
        """
        if self._collectives.rank != 0:
            self._feed.draw_for_remote_pass(epoch)
            return self._broadcast_value(None), self._receive_batches()
        try:
            num_consumed, deliveries = self._feed.start_pass(epoch, num_consumed, num_skipped_steps)
        except Exception as error:
            self._broadcast_failure(error)
            raise
        return self._broadcast_value(num_consumed), self._send_batches(deliveries)

    def _send_batches(self, deliveries: Iterator[Delivery]) -> Iterator[Delivery]:
        """Read the batches of all ranks on the reading rank, broadcast them step by step, and yield this rank's own batches.

        If reading fails, the error is first broadcast, so that the other ranks do not wait. An empty step marks the end.
        """
        while True:
            try:
                step = strip_indices(list(islice(deliveries, self._shard.count)))
                if not self._is_batched:
                    step = set_item_counts(step)
                # A view would be sent with all of the memory that it points into.
                sent = [(copy_views(batch), rank_batch) for batch, rank_batch in step]
            except Exception as error:
                self._broadcast_failure(error)
                raise
            self._broadcast_value(sent)
            if not step:
                return
            yield step[self._shard.index]

    def _receive_batches(self) -> Iterator[Delivery]:
        """Yield this rank's batches from the steps that the reading rank broadcasts, until it sends an empty step."""
        while step := self._broadcast_value(None):
            yield step[self._shard.index]

    def _broadcast_value(self, value: object) -> Any:
        """Return the main process's `value` on every rank. The `value` of other ranks is ignored.

        Raises:
            DataError: If the main process sent a `Failure`.
        """
        value = self._collectives.broadcast_object(value)
        if isinstance(value, Failure):
            raise DataError(f"the main process failed while it read the data for all ranks: {value}; see its traceback")
        return value

    def _broadcast_failure(self, error: Exception) -> None:
        """Send the other ranks the error with which reading has failed, so that they raise an error, too."""
        self._collectives.broadcast_object(Failure(f"{type(error).__name__}: {error}"))


def strip_indices(step: list[Delivery]) -> list[Delivery]:
    """Return the ranks' batches of one step without their sample indices, which other ranks do not need.

    Args:
        step: Pairs of (batch, `RankBatch`), one per data shard; empty if no step is left.
    """
    return [(batch, rank_batch._replace(indices=[])) for batch, rank_batch in step]


def set_item_counts(step: list[Delivery]) -> list[Delivery]:
    """Return one step's items with `valid_counts` set to the number of rows of each rank's item; 0 for a padding item.

    Args:
        step: Pairs of (item, `RankBatch`), one per data shard; empty if no step is left. `valid_counts` counts items.

    Raises:
        DataError: If the rows of an item cannot be counted.
    """
    valid_rows: list[int] = []
    for rank, (_, rank_batch) in enumerate(step):
        if rank_batch.num_rows is None:
            raise DataError(UNCOUNTABLE.format(what=f"the item for rank {rank}"))
        num_items = (rank_batch.valid_counts or ())[rank]
        valid_rows.append(rank_batch.num_rows if num_items > 0 else 0)
    return [(item, rank_batch._replace(valid_counts=tuple(valid_rows))) for item, rank_batch in step]


class Failure(str):
    """Message of an error that occurred while the main process read data. The other ranks get it instead of batches."""
