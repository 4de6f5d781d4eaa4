"""Prepare a user's DataLoader for several ranks, and skip the first batches of a loader."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from headway.core import extensions
from headway.core.config.run import DataLoaderConfiguration
from headway.core.data.choose_feed import FeedBuilder
from headway.core.data.feeds.protocol import BatchFeed
from headway.core.data.loader import LoaderEvents, PreparedLoader
from headway.core.data.loader_checks import check_loader
from headway.core.data.loading_rules import LoadingRules
from headway.core.data.sampling.loader_generator import LoaderGenerator
from headway.core.data.sampling.shard import ShardIndex
from headway.core.data.stalls import find_stall_limit
from headway.core.data.transfer import make_transfer
from headway.core.runtime.collectives.checked import Collectives
from headway.errors import DataError


def prepare_loader(
    loader: DataLoader[Any],
    *,
    shard: ShardIndex,
    config: DataLoaderConfiguration,
    device: torch.device | None,
    collectives: Collectives | None,
    events: LoaderEvents,
    seed: int,
    rng_types: Sequence[str] | None = ("generator",),
    stream: LoaderGenerator | None = None,
    everyone: Collectives | None = None,
    rules: LoadingRules | None = None,
) -> PreparedLoader:
    """Return a loader that gives each rank its shard of the data.

    Args:
        loader: User's loader. A prepared loader is returned unchanged.
        shard: Data shard of this process.
        config: Settings for splitting, padding and moving batches.
        device: Device to move batches to; None to leave them on the host.
        collectives: Collectives of the ranks among which the data is split, in shard order. None if this process reads
            alone.
        events: Functions that the run's loaders call, and record of the batches read.
        seed: Seed of the sample order, equal on all ranks.
        rng_types: Names of the RNGs to synchronize. Only "generator" has an effect: with it, the random generators in
            samplers get rank 0's state at the start of each epoch. None: none are synchronized. Default:
            ("generator",).
        stream: Random number stream from which the run's loaders draw. Default: None, torch's global generator.
        everyone: Collectives of all ranks. Needed only if several ranks read one data shard. Default: None, to use
            `collectives`.
        rules: Rules for ordering, reading and splitting the data. Default: None, rules that follow torch's loaders.

    Raises:
        DataError: If the loader cannot be split among ranks, such as one that already uses a DistributedSampler. Also
            if the ranks' data differ in length or, unless `rules` allow it, in their shards.
        OptionalDependencyMissing: If the configuration requests torchdata's loader and torchdata is not installed.
    """
    if isinstance(loader, PreparedLoader):
        return loader
    check_loader(loader, shard, config, is_shared=everyone is not None and everyone.world_size > 1)
    # With workers, torch's pinning thread copies each batch to pinned memory, and so does the user's loader if it pins.
    pins_copies = loader.pin_memory or loader.num_workers > 0
    transfer = make_transfer(device, config.non_blocking, are_pinned_tensors_copies=pins_copies)
    rules = rules or LoadingRules()
    builder = FeedBuilder(
        loader=loader,
        shard=shard,
        config=config,
        rules=rules,
        collectives=collectives if shard.count > 1 else None,
        everyone=everyone,
        seed=seed,
        stream=stream or LoaderGenerator(),
        is_synchronized="generator" in (rng_types or ()),
        is_moved_to_device=device is not None,
    )
    feed = builder.build_feed()
    if transfer is not None and transfer.is_faster_when_pinned and loader.num_workers:
        feed.inner_loader.pin_memory = True
    prepared = rules.wrap_loader(
        config,
        user_loader=loader,
        feed=feed,
        shard=shard,
        device=device,
        transfer=transfer,
        events=events,
        listeners=_find_epoch_listeners(loader, feed),
        draws_order_late=rules.draws_order_late,
        stall_limit=find_stall_limit(loader.dataset),
    )
    if prepared.stall_limit:
        extensions.load("feature", "stall_limit")(prepared, events)
    return prepared


def _find_epoch_listeners(loader: DataLoader[Any], feed: BatchFeed) -> list[Any]:
    """Return those samplers and datasets of a loader, and of `feed`'s own reader, that have a `set_epoch` method.

    The method must be called before each epoch.
    """
    samplers = loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)
    candidates = *samplers, loader.dataset, feed.inner_loader.dataset
    # One object can occur several times. Call its method only once.
    listeners = {id(each): each for each in candidates if callable(getattr(each, "set_epoch", None))}
    return list(listeners.values())


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> PreparedLoader:
    """Return a loader whose next pass starts at batch `num_batches`, counted from 0. Later passes are complete.

    Call it on every rank if the loader is prepared. A run that continues with `accelerator.resume` does not need it.
    The returned loader is a new object; `dataloader` itself skips nothing. Skipped samples of a map-style dataset are
    not fetched. Skipped samples of an iterable dataset are read, but not collated.

    Args:
        dataloader: Prepared loader, or a plain DataLoader. A plain loader is neither split among ranks nor moved to a
            device. It shuffles with torch's global RNG, as it does without Headway.
        num_batches: Number of this rank's batches to skip. Default: 0.

    Raises:
        DataError: If `num_batches` is negative or not an integer, or `dataloader` is not a DataLoader.
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
