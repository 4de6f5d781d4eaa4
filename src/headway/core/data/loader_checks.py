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
        DataError: If the loader overrides `__iter__`, shuffles a dataset that has an order of its own, or is already
            split by rank. Also if `split_batches` cannot divide its batches by the number of shards.
    """
    loader_class = type(loader)
    if loader_class.__iter__ is not DataLoader.__iter__ and not loader_class.__module__.startswith("torchdata."):
        raise DataError(
            f"{loader_class.__name__} overrides DataLoader.__iter__, which Headway replaces to divide the data among ranks; "
            "move its code into the dataset, the collate_fn or the batch_sampler, or iterate it without preparing it"
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
