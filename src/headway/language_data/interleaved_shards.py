"""Read a stream's shards in turn, in the order in which a run with a different number of ranks read them.

If each rank reads its own shards, an update consists of one batch from each rank. After a resume with a different
number of ranks, updates should contain the same samples as before. So the shards of the previous ranks are read in
turn, one batch of each at a time.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset


class InterleavedShards(IterableDataset[Any]):
    """Iterable dataset that yields the samples of a stream in the order in which several ranks read its shards.

    The shards are read in turn, one batch of each at a time. When a shard is exhausted, reading continues with the
    others. So every sample is read once, unless `drop_last` is set.

    Args:
        dataset: Stream with the method `shard(num_shards, index)`, such as a `datasets.IterableDataset`.
        num_ranks: Number of ranks whose order is followed. The stream is split into this number of shards.
        batch_size: Number of samples per batch and rank.
        drop_last: Whether reading ends before the first turn in which some shard has no complete batch.
        epoch: Number of the epoch, for shards with the method `set_epoch`.
    """

    def __init__(self, dataset: Any, num_ranks: int, batch_size: int, drop_last: bool, epoch: int) -> None:
        self._dataset = dataset
        self._num_ranks = num_ranks
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        readers = [iter(self._build_shard(index)) for index in range(self._num_ranks)]
        while readers:
            batches = [list(islice(reader, self._batch_size)) for reader in readers]
            if self._drop_last and any(len(batch) < self._batch_size for batch in batches):
                return
            for batch in batches:
                yield from batch
            # A shard with an incomplete batch is exhausted.
            readers = [reader for reader, batch in zip(readers, batches) if len(batch) == self._batch_size]

    def _build_shard(self, index: int) -> Any:
        """Return the shard of the dataset that one rank would read in this epoch."""
        shard = self._dataset.shard(num_shards=self._num_ranks, index=index)
        if callable(getattr(shard, "set_epoch", None)):
            shard.set_epoch(self._epoch)
        return shard


def describe_changed_order(
    name: str, num_consumed: int, saved_order: Sequence[int], current_order: Sequence[int]
) -> str:
    """Return the error message for a pass over a stream that cannot be resumed, because the sample order has changed.

    Args:
        name: Name of the dataset's class.
        num_consumed: Number of samples read in the epoch before the position was saved.
        saved_order: Order of the saved pass, as three numbers: ranks that read different shards, workers, and samples
            that a worker reads per turn.
        current_order: Order of the pass that should continue the saved one, in the format of `saved_order`.
    """
    return (
        f"the iterable dataset {name} was left after {num_consumed} samples of an epoch, when {_describe_order(saved_order)}; now "
        f"{_describe_order(current_order)}. Its samples come in another order now, so some would be read twice and others never. Go "
        "on with the same number of ranks, the same num_workers and the same batch size, or begin another epoch with "
        "loader.set_epoch(n). A stream that is saved with num_workers=0 or 1 can go on with other numbers, and "
        "headway.ShardedDataset reads files with any"
    )


def describe_full_read(name: str, saved_order: Sequence[int]) -> str:
    """Return the warning that every rank must read the whole stream to continue a saved pass in its sample order.

    Args:
        name: Name of the dataset's class.
        saved_order: Order of the saved pass, as three numbers: ranks that read different shards, workers, and samples
            that a worker reads per turn.
    """
    return (
        f"the stream {name} was left when {_describe_order(saved_order)}. To continue exactly, every rank reads the whole stream "
        "with at most one worker until the end of this epoch"
    )


def _describe_order(order: Sequence[int]) -> str:
    """Return a clause that describes how ranks and workers read a stream: "2 workers read 8 samples in turn"."""
    num_ranks, num_workers, size = order
    readers = f"{num_workers} workers read {size} samples in turn" if num_workers > 1 else "one process read it"
    if num_ranks == 1:
        return readers
    return f"each of {num_ranks} ranks read its own shards, {readers}, {size} samples a batch"
