"""Beginning in the middle of an epoch."""

from typing import Any

import torch
from torch.utils.data import DataLoader

from headway.config.run import DataLoaderConfiguration
from headway.data.build import prepare_loader
from headway.data.loader import LoaderEvents, PreparedLoader
from headway.data.sampling.shard import ShardIndex
from headway.errors import DataError


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> PreparedLoader:
    """A loader whose next pass begins at batch `num_batches`; later passes are whole.

    Samples of a map-style dataset that are skipped are never fetched, whatever their number; those of an iterable
    dataset are read, not collated.

    Args:
        dataloader: a prepared loader, or a plain DataLoader, whose shuffled order stays what torch's random state
            makes it.
        num_batches: batches of one rank to skip.

    Raises:
        DataError: the number is negative, or this is not a DataLoader.
    """
    if not isinstance(dataloader, DataLoader):
        raise DataError(f"skip_first_batches got a {type(dataloader).__name__}; give a DataLoader, prepared or not")
    if not isinstance(dataloader, PreparedLoader):
        config = DataLoaderConfiguration(use_seedable_sampler=False)
        dataloader = prepare_loader(
            dataloader,
            shard=ShardIndex(0, 1),
            config=config,
            device=None,
            collectives=None,
            events=LoaderEvents(),
            seed=torch.initial_seed(),
        )
    return dataloader.skip(num_batches)
