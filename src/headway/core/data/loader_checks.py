"""Checks that a user's DataLoader can be split among ranks. They run in `prepare()`, before any data is read."""

from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterDataPipe,
    MapDataPipe,
    RandomSampler,
)

from headway.core.config.run import DataLoaderConfiguration
from headway.core.data.sampling.shard import ShardIndex
from headway.errors import DataError


def check_loader(loader: DataLoader[Any], shard: ShardIndex, config: DataLoaderConfiguration, is_shared: bool) -> None:
    """Check that a loader can be split among ranks. No data is read.

    Args:
        loader: User's loader.
        shard: Data shard of this process.
        config: Loader configuration of the run.
        is_shared: Whether several processes read the data, even if all of them read one shard.

    Raises:
        DataError: If the loader's class overrides `__iter__`, or changes the iterator in `_get_iterator` (torchdata's own
            classes may). If the loader shuffles a dataset that has an order of its own. If the sampler is already split by
            rank, or, with several processes, the dataset is. With `split_batches`, if the loader makes no batches, or the
            batch size is not divisible by the number of shards.
    """
    loader_class = type(loader)
    # torchdata's stateful loaders override both methods. Headway rebuilds such a loader as its own class, which keeps them.
    if not loader_class.__module__.startswith("torchdata."):
        if loader_class.__iter__ is not DataLoader.__iter__:
            raise DataError(
                f"{loader_class.__name__} overrides DataLoader.__iter__, which Headway replaces to divide the data among ranks; "
                "move its code into the dataset, the collate_fn or the batch_sampler, or iterate it without preparing it"
            )
        if _has_own_iterator(loader):
            raise DataError(
                f"{loader_class.__name__} overrides DataLoader._get_iterator to change the batches, and Headway replaces this method "
                "to divide the data among ranks; for a loader of torch_geometric, pass filter_per_worker=True. In a class of your "
                "own, move the code into the dataset, the collate_fn or the batch_sampler"
            )
    # A custom batch sampler has its own sampler, and `loader.sampler` is then a placeholder.
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            raise DataError(
                f"the DataLoader's {type(sampler).__name__} already picks one of {sampler.num_replicas} parts of the "
                "data, and Headway would divide that part again; leave the sampler out and pass shuffle= to the "
                "DataLoader"
            )
        if isinstance(sampler, RandomSampler) and getattr(loader.dataset, "orders_samples", False):
            raise DataError(
                f"the DataLoader shuffles a {type(loader.dataset).__name__}, which has an order of its own that would "
                "be lost; leave shuffle=True out, and use the dataset's own seed="
            )
    # Check this even if all ranks read one shard: a dataset that is already split by rank would give them different
    # batches.
    if shard.count > 1 or is_shared:
        _check_unsplit(loader.dataset)
    if shard.count > 1 and config.split_batches:
        _check_divisible(loader, shard.count)


class _PlainIterator(DataLoader[Any]):
    """Base class whose `_get_iterator` returns `plain_iterator` instead of creating DataLoader's iterator.

    `_has_own_iterator` puts it behind a user's class, so that `super()._get_iterator()` reads no data and starts no worker.

    Attributes:
        plain_iterator: Iterator that `_get_iterator` returns.
    """

    plain_iterator: Any

    def _get_iterator(self) -> Any:
        return self.plain_iterator


def _has_own_iterator(loader: DataLoader[Any]) -> bool:
    """Whether a loader's class replaces or wraps the iterator that DataLoader makes.

    An override alone does not prove this: torch_geometric's loaders always override `_get_iterator`, but wrap it only
    with `filter_per_worker=False`. So the override is called on a copy of the loader in which `super()` leads to
    `_PlainIterator`.
    """
    loader_class = type(loader)
    classes = loader_class.__mro__[: loader_class.__mro__.index(DataLoader)]
    if not any("_get_iterator" in vars(each) for each in classes):
        return False
    probe_class: Any = type(loader_class.__name__, (loader_class, _PlainIterator), {})
    probe = object.__new__(
        probe_class
    )  # a copy of the loader without DataLoader.__init__, whose checks it does not need
    probe.__dict__.update(vars(loader), plain_iterator=iter(()))
    try:
        return probe._get_iterator() is not probe.plain_iterator
    except Exception:  # the override used something that only an iterator made by DataLoader has
        return True


def _check_unsplit(dataset: Any) -> None:
    """Raise `DataError` if a dataset contains only one rank's samples, or splits itself by rank."""
    # split_dataset_by_node sets this attribute; torch's data pipes shard themselves by the process group.
    if getattr(dataset, "_distributed", None) is not None:
        raise DataError(
            "the dataset already contains only one rank's part (split_dataset_by_node), and Headway would divide it again; leave "
            "that call out"
        )
    if isinstance(dataset, IterDataPipe | MapDataPipe):
        raise DataError(
            f"{type(dataset).__name__} is one of torch's (deprecated) data pipes, which shard themselves by the "
            "process group; read it through an ordinary Dataset or IterableDataset"
        )


def _check_divisible(loader: DataLoader[Any], num_shards: int) -> None:
    """Raise `DataError` if a loader's batches cannot be split into `num_shards` equal parts."""
    if loader.batch_size is None and loader.batch_sampler is None:
        raise DataError(
            "split_batches=True with batch_size=None: the DataLoader makes no batches to split; give it a batch_size, or leave "
            f"split_batches out (each rank then takes every {num_shards}. item)"
        )
    batch_sampler = loader.batch_sampler
    size = getattr(batch_sampler, "batch_size", None) if isinstance(batch_sampler, BatchSampler) else loader.batch_size
    if isinstance(size, int) and size % num_shards:
        raise DataError(
            f"split_batches=True shares each batch of {size} samples among {num_shards} processes, but the size is not divisible by "
            f"this number. Use a batch_size that is a multiple of {num_shards} (such as {-(-size // num_shards) * num_shards}), or "
            "split_batches=False with the batch size of one process"
        )
