"""From a user's DataLoader to the prepared one: what kind of data it reads, and how that is shared out; beginning in mid-epoch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, IterDataPipe, MapDataPipe

from headway.common.optional import require
from headway.config.run import DataLoaderConfiguration
from headway.data.feeds import BatchFeed
from headway.data.feeds.dispatch import DispatchFeed
from headway.data.feeds.mapped import MappedFeed
from headway.data.feeds.stream import OwnShards, SharedRounds, StreamFeed, is_shardable
from headway.data.loader import LoaderEvents, PreparedLoader
from headway.data.sampling.order import BaseSeed, LoaderGenerator, LoadingRules, RandomSource, SampleOrder, length_of
from headway.data.sampling.rng import Agree
from headway.data.sampling.shard import BatchSplit, SampleSplit, ShardIndex
from headway.data.transfer import transfer_to
from headway.errors import DataError
from headway.runtime.collectives.checked import Collectives


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
    """Share a loader's data out over the ranks.

    Args:
        loader: the user's; a prepared one comes back as it is.
        shard: this process's part of the data.
        config: how to split, pad and move.
        device: where batches go; None: left where they are.
        collectives: the ranks that share the data, in the order of their shards; None: this process alone.
        events: of the run's loaders.
        seed: of the order, the same on all ranks.
        rng_types: with "generator", samplers' own generators get rank 0's state at the start of each epoch.
        stream: what the run's loaders draw from; None: torch's global generator.
        everyone: all ranks, where several of them read the same part of the data; None: those of `collectives`.
        rules: how to order, read and share out; None: as torch's loaders do.

    Raises:
        DataError: the loader's settings and the configuration do not fit together.
    """
    if isinstance(loader, PreparedLoader):
        return loader
    _check(loader, shard, config, is_shared=everyone is not None and everyone.world_size > 1)
    # What workers read comes from torch's pinning thread; without them the transfer pins, or the user's loader if it says so.
    transfer = transfer_to(device, config.non_blocking, are_pinned_fresh=loader.pin_memory or loader.num_workers > 0)
    among = collectives if shard.count > 1 else None
    draws = seed, "generator" in (rng_types or ()), stream or LoaderGenerator()
    recipe = _Recipe(loader, shard, config, among, *draws, everyone, rules or LoadingRules())
    feed = recipe.feed()
    if transfer is not None and transfer.wants_pinned and loader.num_workers:
        feed.inner.pin_memory = True
    listeners = _listeners(loader, feed)
    return recipe.rules.wrap(config, loader, feed, shard, device, transfer, events, listeners, recipe.rules.opens_late)


@dataclass
class _Recipe:
    """The choices that lead from a loader and a configuration to a feed."""

    loader: DataLoader[Any]
    shard: ShardIndex
    config: DataLoaderConfiguration
    collectives: Collectives | None
    seed: int
    is_synchronised: bool
    stream: LoaderGenerator
    everyone: Collectives | None
    rules: LoadingRules

    def __post_init__(self) -> None:
        if self.everyone is None or self.everyone.world_size == 1:
            self.everyone = self.collectives
        self.is_apart = self.rules.is_apart(self.config)
        self.base_seed = BaseSeed(self.loader, self.is_apart, self.stream)
        self.is_batched = self.loader.batch_sampler is not None
        self.is_even = self.config.even_batches and self.shard.count > 1
        self.is_dispatched = bool(self.config.dispatch_batches) and self.everyone is not None
        # Where several ranks read the same, workers' streams are functions of the seed that all have agreed on.
        self.is_shared = self.everyone is not self.collectives and not self.is_dispatched
        self.ranks: Sequence[int] = range(self.shard.count) if self.is_dispatched else (self.shard.index,)

    def feed(self) -> BatchFeed:
        """Where the batches come from."""
        kind = _loader_class(self.loader, self.config)
        if self.is_dispatched and self.everyone is not None:
            inner = self._stream(kind) if _is_stream(self.loader) else self._mapped()
            length = self.everyone.broadcast_object(length_of(inner))
            return DispatchFeed(inner, self.everyone, self.shard, self.is_batched, length)
        if not _is_stream(self.loader):
            feed = self._mapped()
            self._check_lengths(feed)
            return feed
        if self.collectives is not None and is_shardable(self.loader.dataset, self.shard.count):
            return self._own_stream(kind, self.collectives)
        return self._stream(kind)

    def _mapped(self) -> MappedFeed:
        batch_sampler = self.loader.batch_sampler
        split: SampleSplit | BatchSplit
        if not self.is_batched:
            order, split = self._order(self.loader.sampler), SampleSplit(1, self.shard.count, False, self.is_even)
        elif type(batch_sampler) is BatchSampler:
            size = self._size(batch_sampler.batch_size)
            order = self._order(batch_sampler.sampler)
            split = self._split(size, batch_sampler.drop_last)
        else:
            full = batch_sampler.batch_size if isinstance(batch_sampler, BatchSampler) else None
            drops_last = getattr(batch_sampler, "drop_last", False) is True
            order = self._order(batch_sampler)
            split = BatchSplit(self.shard.count, self.config.split_batches, drops_last, self.is_even, full)
        own = self.loader, order, split, self.ranks, self.seed, self.collectives, self.base_seed, self.is_apart
        return MappedFeed(*own, self.is_shared, self.rules.reads_ahead, self.rules.leaves_workers)

    def _order(self, sampler: Any) -> SampleOrder:
        draws = RandomSource(self.config, self.seed, self.stream, self._agree, self.is_synchronised)
        return self.rules.order_of(sampler, draws)

    @property
    def _agree(self) -> Agree | None:
        # Where one process draws for all, nothing has to be agreed.
        return None if self.is_dispatched or self.everyone is None else self.everyone.broadcast_object

    def _check_lengths(self, feed: MappedFeed) -> None:
        """Every rank must hold the same data: then no rank can run out before another."""
        if self.everyone is None:
            return
        lengths = [int(row[0]) for row in self.everyone.gather_numbers([length_of(feed.order) or 0])]
        if len(set(lengths)) > 1:
            raise DataError(
                f"the ranks' DataLoaders have different lengths (samples or batches: {lengths}); give every rank the "
                "same dataset and sampler, Headway shares it out. Data that is split already needs no prepared loader"
            )

    def _stream(self, kind: type[DataLoader[Any]]) -> StreamFeed:
        split = self._split(self._size(self.loader.batch_size), self.loader.drop_last)
        agree = self._agree if self.is_synchronised else None
        joins = split.is_spread and split.count > 1 and self.loader.num_workers > 1
        own = self.loader, split, self.ranks, self.seed, self.base_seed, kind
        return StreamFeed(*own, agree=agree, is_shared=self.is_shared, joins=joins)

    def _own_stream(self, kind: type[DataLoader[Any]], collectives: Collectives) -> StreamFeed:
        index, count = self.shard.index, self.shard.count
        dataset = self.loader.dataset.shard(num_shards=count, index=index)  # type: ignore[attr-defined]
        own = OwnShards(dataset, index, count, SharedRounds(collectives, self.loader.drop_last))
        split = SampleSplit(self._size(self.loader.batch_size), 1, self.loader.drop_last, self.is_even)
        return StreamFeed(self.loader, split, (0,), self.seed, self.base_seed, kind, own)

    def _split(self, size: int, drop_last: bool) -> SampleSplit:
        is_spread = self.is_batched and self.rules.spreads(self.config, _is_stream(self.loader))
        return SampleSplit(size, self.shard.count, drop_last, self.is_even, is_spread)

    def _size(self, batch_size: int | None) -> int:
        """Samples (unbatched: items) of one rank in one step."""
        if batch_size is None:
            return 1
        return batch_size // self.shard.count if self.config.split_batches else batch_size


def _is_stream(loader: DataLoader[Any]) -> bool:
    return isinstance(loader.dataset, IterableDataset)


def _loader_class(loader: DataLoader[Any], config: DataLoaderConfiguration) -> type[DataLoader[Any]]:
    if config.use_stateful_dataloader:
        module = require("torchdata.stateful_dataloader", "use_stateful_dataloader=True needs", "headway[stateful]")
        return module.StatefulDataLoader  # type: ignore[no-any-return]
    if hasattr(loader, "state_dict") and type(loader).__module__.startswith("torchdata."):
        return type(loader)
    return DataLoader


def _listeners(loader: DataLoader[Any], feed: BatchFeed) -> list[Any]:
    samplers = loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)
    candidates = *samplers, loader.dataset, feed.inner.dataset
    found = {id(candidate): candidate for candidate in candidates if callable(getattr(candidate, "set_epoch", None))}
    return list(found.values())


def _check(loader: DataLoader[Any], shard: ShardIndex, config: DataLoaderConfiguration, is_shared: bool) -> None:
    """Refuse what cannot be shared out, before anything is read."""
    kind = type(loader)
    if kind.__iter__ is not DataLoader.__iter__ and not kind.__module__.startswith("torchdata."):
        raise DataError(
            f"{kind.__name__} overrides DataLoader.__iter__, which Headway replaces to share the data out; move what "
            "it does into the dataset, the collate_fn or the batch_sampler, or iterate it without preparing it"
        )
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            raise DataError(
                f"the DataLoader's {type(sampler).__name__} already picks one of {sampler.num_replicas} parts of the "
                "data, and Headway would share out that part again; leave the sampler out and pass shuffle= to the "
                "DataLoader"
            )
    if shard.count > 1 or is_shared:  # also where all ranks read the same: parts of their own would be other batches
        _check_unsplit(loader.dataset)
    if shard.count > 1 and config.split_batches:
        _check_split(loader, shard.count)


def _check_unsplit(dataset: Any) -> None:
    # split_dataset_by_node leaves this mark, torch's pipes shard themselves by the process group.
    if getattr(dataset, "_distributed", None) is not None:
        raise DataError(
            "the dataset holds one rank's part already (split_dataset_by_node), and Headway shares data out; leave that call out"
        )
    if isinstance(dataset, IterDataPipe | MapDataPipe):
        raise DataError(
            f"{type(dataset).__name__} is one of torch's (deprecated) data pipes, which shard themselves by the "
            "process group; read it through an ordinary Dataset or IterableDataset"
        )


def _check_split(loader: DataLoader[Any], count: int) -> None:
    if loader.batch_size is None and loader.batch_sampler is None:
        raise DataError(
            "split_batches=True with batch_size=None: the DataLoader makes no batches to split; give it a batch_size, or leave "
            f"split_batches out (each rank then takes every {count}. item)"
        )
    batch_sampler = loader.batch_sampler
    size = getattr(batch_sampler, "batch_size", None) if isinstance(batch_sampler, BatchSampler) else loader.batch_size
    if isinstance(size, int) and size % count:
        raise DataError(
            f"split_batches=True shares each batch of {size} samples among {count} processes, which does not come out "
            f"even; use a batch_size that is a multiple of {count} (such as {-(-size // count) * count}), or "
            "split_batches=False with the batch size of one process"
        )


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
        alone: dict[str, Any] = {"shard": ShardIndex(0, 1), "config": config, "device": None, "collectives": None}
        dataloader = prepare_loader(dataloader, **alone, events=LoaderEvents(), seed=torch.initial_seed())
    return dataloader.skip(num_batches)
