"""Choose the `BatchFeed` that reads a loader's batches, depending on its dataset, its sampler and the configuration.

`FeedBuilder.build_feed` makes the choice, once for each loader, when `prepare()` is called:

- `dispatch_batches` is in effect: one rank reads all batches and sends them to the others (`DispatchFeed`).
- The dataset is map-style: each rank reads its samples by index (`MappedFeed`).
- The dataset is iterable and can be sharded: each rank reads its own dataset shards (`StreamFeed` with `OwnShards`).
- The dataset is iterable: each rank reads all samples and keeps its slice of each step (`StreamFeed`).

The first of these cases that applies determines the type.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from headway.common.optional import require
from headway.core import extensions
from headway.core.config.run import DataLoaderConfiguration
from headway.core.data.compare.fingerprint import (
    compare_fingerprints,
    describe_difference,
    hash_fingerprint,
    take_fingerprint,
)
from headway.core.data.feeds.dispatch import DispatchFeed
from headway.core.data.feeds.mapped import MappedFeed
from headway.core.data.feeds.protocol import BatchFeed
from headway.core.data.feeds.row_count_exchange import RowCountExchange
from headway.core.data.feeds.step_comparison import StepComparison
from headway.core.data.feeds.stream import OwnShards, StreamFeed, is_shardable
from headway.core.data.feeds.worker import WorkerSeeding
from headway.core.data.loading_rules import LoadingRules, RandomSource
from headway.core.data.sampling.handover import DatasetHandover
from headway.core.data.sampling.loader_generator import BaseSeed, LoaderGenerator
from headway.core.data.sampling.order import SampleOrder, get_length
from headway.core.data.sampling.rng import Broadcast
from headway.core.data.sampling.sampler_order import SamplerOrder
from headway.core.data.sampling.shard import BatchSplit, SampleSplit, ShardIndex
from headway.core.runtime.collectives.checked import Collectives
from headway.errors import DataError
from headway.log import get_logger

log = get_logger(__name__)


@dataclass
class FeedBuilder:
    """Builder of the `BatchFeed` that reads the batches of a loader.

    Args:
        loader: User's loader.
        shard: Data shard of this process.
        config: Loader configuration of the run.
        rules: Rules for ordering, reading and splitting the data.
        collectives: Collectives of the ranks among which the data is split, in shard order; None if this process reads
            alone.
        everyone: Collectives of all ranks, of which several may read one shard. None or a single rank: `collectives` is
            used instead.
        seed: Seed of the sample order, equal on all ranks.
        stream: Random number stream from which the run's loaders draw.
        is_synchronized: Whether random generators in samplers start each epoch with rank 0's state.
        is_moved_to_device: Whether batches are moved to a device.

    Attributes:
        base_seed: Source of the workers' base seed.
        has_seeded_order: Whether the sample order and the workers' RNG states are functions of (seed, epoch).
        is_batched: Whether torch's DataLoader builds batches. Otherwise it yields single items of the dataset.
        even_batches: Whether an incomplete last step is completed with repeated samples. False for a single shard.
        is_dispatched: Whether one rank reads all batches and sends them to the others.
        reads_alone: Whether this is the only process that reads the data.
        ranks: Indices of the shards whose batches this process reads.
    """

    loader: DataLoader[Any]
    shard: ShardIndex
    config: DataLoaderConfiguration
    rules: LoadingRules
    collectives: Collectives | None
    everyone: Collectives | None
    seed: int
    stream: LoaderGenerator
    is_synchronized: bool
    is_moved_to_device: bool

    def __post_init__(self) -> None:
        if self.everyone is None or self.everyone.world_size == 1:
            self.everyone = self.collectives
        self.has_seeded_order = self.rules.has_seeded_order(self.config)
        self.base_seed = BaseSeed(self.loader, self.has_seeded_order, self.stream)
        self.is_batched = self.loader.batch_sampler is not None
        self.even_batches = self.config.even_batches and self.shard.count > 1
        is_dispatched = self.rules.should_dispatch(self.config, _is_stream(self.loader), self.is_moved_to_device)
        self.is_dispatched = is_dispatched and self.everyone is not None
        # Whether several ranks read this shard, such as the ranks of one tensor-parallel group.
        is_shard_shared = self.everyone is not self.collectives and not self.is_dispatched
        self.reads_alone = self.shard.count == 1 and not is_shard_shared
        self.ranks: Sequence[int] = range(self.shard.count) if self.is_dispatched else (self.shard.index,)

    def build_feed(self) -> BatchFeed:
        """Return the `BatchFeed` that reads this rank's batches. The start of this file lists the types.

        All ranks must call this method, because they compare the lengths or the shards of their data.

        Raises:
            DataError: If the ranks' map-style datasets differ in length. Also if their shards of an iterable dataset do
                not fit together, unless `rules` allow different data.
            OptionalDependencyMissing: If the configuration requests torchdata's loader and torchdata is not installed.
        """
        loader_class = choose_loader_class(self.loader, self.config)
        is_stream = _is_stream(self.loader)
        if self.is_dispatched and self.everyone is not None:
            feed: BatchFeed = self._build_stream_feed(loader_class) if is_stream else self._build_mapped_feed()
            num_batches = self.everyone.broadcast_object(get_length(feed))
            return DispatchFeed(feed, self.everyone, self.shard, self.is_batched, num_batches)
        if not is_stream:
            mapped_feed = self._build_mapped_feed()
            self._check_lengths(mapped_feed)
            return mapped_feed
        if self.collectives is not None and is_shardable(self.loader.dataset, self.shard.count):
            return self._build_sharded_feed(loader_class, self.collectives)
        return self._build_stream_feed(loader_class)

    # ---------------------------------------------------------------- map-style datasets

    def _build_mapped_feed(self) -> MappedFeed:
        """Return the feed of a loader with a map-style dataset, with its sample order and the split of samples among ranks."""
        batch_sampler = self.loader.batch_sampler
        split: SampleSplit | BatchSplit
        if not self.is_batched:
            order = self._build_order(self.loader.sampler)
            split = SampleSplit(1, self.shard.count, False, self.even_batches)
        elif type(batch_sampler) is BatchSampler:  # not a subclass, which may yield other batches
            order = self._build_order(batch_sampler.sampler)
            samples_per_rank = self._count_samples_per_rank(batch_sampler.batch_size)
            split = self._make_split(samples_per_rank, batch_sampler.drop_last)
        else:
            order = self._build_order(batch_sampler)
            split = BatchSplit(
                num_ranks=self.shard.count,
                splits_batches=self.config.split_batches,
                drop_last=getattr(batch_sampler, "drop_last", False) is True,
                even_batches=self.even_batches,
                batch_size=batch_sampler.batch_size if isinstance(batch_sampler, BatchSampler) else None,
            )
        # Other orders are equal on all ranks by construction.
        is_compared = isinstance(order, SamplerOrder) and self.everyone is not None and not self.is_dispatched
        return MappedFeed(
            loader=self.loader,
            order=order,
            split=split,
            ranks=self.ranks,
            seed=self.seed,
            collectives=self.collectives,
            base_seed=self.base_seed,
            reads_alone=self.reads_alone,
            worker_seeding=self._choose_worker_seeding(),
            reads_ahead=self.rules.reads_ahead,
            compare_order=self._compare_order if is_compared else None,
        )

    def _build_order(self, sampler: Any) -> SampleOrder:
        """Return the sample order of a sampler, or of a custom batch sampler."""
        draws = RandomSource(self.config, self.seed, self.stream, self._broadcast, self.is_synchronized)
        return self.rules.choose_order(sampler, draws)

    def _choose_worker_seeding(self) -> WorkerSeeding:
        """Return how the workers of a loader with a map-style dataset get their random numbers.

        A process that reads alone keeps torch's random numbers, and a saved state contains the workers' RNG states. With
        several processes, or if the order depends only on (seed, epoch), samples are seeded by their position, unless
        the loading rules keep torch's seeding.
        """
        if self.reads_alone and not self.has_seeded_order:
            return WorkerSeeding.RECORDED
        return WorkerSeeding.TORCH if self.rules.keeps_torch_worker_seeds else WorkerSeeding.BY_POSITION

    def _check_lengths(self, feed: MappedFeed) -> None:
        """Raise `DataError` if the ranks' data differ in length. With equal lengths, all ranks end a pass together."""
        if self.everyone is None:
            return
        lengths = [int(row[0]) for row in self.everyone.gather_numbers([get_length(feed.order) or 0])]
        if len(set(lengths)) > 1:
            raise DataError(
                f"the ranks' DataLoaders have different lengths (samples or batches: {lengths}). Give every rank the same dataset "
                "and sampler, because Headway divides the samples. If the data is already split, do not prepare the loader"
            )

    def _compare_order(self, first_items: list[Any]) -> None:
        """Raise `DataError` if the ranks' samplers begin a pass with different indices.

        If the loading rules allow different data on different ranks, warn once instead. All ranks must call this
        method.

        Args:
            first_items: First indices (or first batches of indices) that this rank's sampler yielded in this pass.
        """
        assert self.everyone is not None
        own_fingerprint = take_fingerprint([first_items])
        if self._is_equal_on_all_ranks(hash_fingerprint(own_fingerprint)):
            return
        fingerprints = self.everyone.gather_objects(own_fingerprint)
        _, paths = compare_fingerprints(fingerprints)
        difference = describe_difference(fingerprints, paths[0])
        sampler = self.loader.sampler if type(self.loader.batch_sampler) is BatchSampler else self.loader.batch_sampler
        self._raise_or_warn(
            f"the ranks' samplers ({type(sampler).__name__}) begin with different indices: {difference}. "
            "A prepared loader gives each rank its share of the sampler's order, so the order must be the same on all ranks. Leave "
            "out the split by rank, and draw from the global generators, from a torch.Generator that is an attribute of the sampler, "
            "or by one seed for all ranks. To let the sampler pick each rank's own samples, do not prepare() its loader"
        )

    # ---------------------------------------------------------------- iterable datasets

    def _build_stream_feed(self, loader_class: type[DataLoader[Any]]) -> StreamFeed:
        """Return the feed of a loader with an iterable dataset.

        Args:
            loader_class: Class of the inner loader.
        """
        split = self._make_split(self._count_samples_per_rank(self.loader.batch_size), self.loader.drop_last)
        broadcast = self._broadcast if self.is_synchronized else None
        worker_reads_one_rank = split.spreads_last_step and split.num_ranks > 1 and self.loader.num_workers > 1
        handover = DatasetHandover(self.stream, self._broadcast) if self.rules.compares_iterable_datasets else None
        return StreamFeed(
            loader=self.loader,
            split=split,
            ranks=self.ranks,
            seed=self.seed,
            base_seed=self.base_seed,
            reads_alone=self.reads_alone,
            loader_class=loader_class,
            broadcast=broadcast,
            worker_reads_one_rank=worker_reads_one_rank,
            compare_steps=self._build_comparison(),
            handover=handover,
        )

    def _build_sharded_feed(self, loader_class: type[DataLoader[Any]], collectives: Collectives) -> StreamFeed:
        """Return the feed for an iterable dataset of which each rank reads its own shards. All ranks must call this.

        Raises:
            DataError: If the ranks' shards do not fit together, unless the loading rules allow different data.
        """
        self._check_sources()
        index, count = self.shard.index, self.shard.count
        dataset = self.loader.dataset.shard(num_shards=count, index=index)  # type: ignore[attr-defined]
        samples_per_rank = self._count_samples_per_rank(self.loader.batch_size)
        shards = OwnShards(
            dataset=dataset,
            index=index,
            count=count,
            mark_last=RowCountExchange(collectives, self.loader.drop_last),
            full_read_split=self._make_split(samples_per_rank, self.loader.drop_last),
            compare_full_reads=self._build_comparison(),
        )
        # To this rank, its own shards are a complete dataset, which is not split any further.
        return StreamFeed(
            loader=self.loader,
            split=SampleSplit(samples_per_rank, 1, self.loader.drop_last, self.even_batches),
            ranks=(0,),
            seed=self.seed,
            base_seed=self.base_seed,
            reads_alone=False,
            loader_class=loader_class,
            shards=shards,
        )

    def _build_comparison(self) -> StepComparison | None:
        """Return the check that all ranks read the same samples, for an iterable dataset that each rank reads in full.

        Return None if the samples are not compared.
        """
        if self.everyone is None or self.is_dispatched or not self.rules.compares_iterable_datasets:
            return None
        return StepComparison(self.everyone, type(self.loader.dataset).__name__)

    def _check_sources(self) -> None:
        """Raise `DataError` if the shards of the iterable dataset, or their order, differ between ranks.

        If the loading rules allow different data on different ranks, warn once instead.
        """
        hash_sources = extensions.load("feature", "hash_stream_sources")
        if self._is_equal_on_all_ranks(hash_sources(self.loader.dataset)):
            return
        message = (
            "the ranks' iterable datasets read different shards, or shuffle them differently, and each rank would take its shards of "
            "another whole: some samples would be read twice and others never. Pass the same seed= to shuffle() on all ranks and "
            "leave shard() by rank out, or let rank 0 read for all: DataLoaderConfiguration(dispatch_batches=True)"
        )
        self._raise_or_warn(message)

    # ---------------------------------------------------------------- helpers

    def _make_split(self, samples_per_rank: int, drop_last: bool) -> SampleSplit:
        """Return the rule that divides samples into one batch per rank and step."""
        spreads_last_step = self.is_batched and self.rules.should_spread_last_step(self.is_dispatched)
        return SampleSplit(samples_per_rank, self.shard.count, drop_last, self.even_batches, spreads_last_step)

    def _count_samples_per_rank(self, batch_size: int | None) -> int:
        """Return the number of samples that one rank gets per step. It is 1 if the loader does not batch.

        Args:
            batch_size: Batch size of the script's DataLoader, or None if it does not batch.
        """
        if batch_size is None:
            return 1
        return batch_size // self.shard.count if self.config.split_batches else batch_size

    @property
    def _broadcast(self) -> Broadcast | None:
        """Function that returns rank 0's value on every rank; None if one process draws the order for all ranks."""
        return None if self.is_dispatched or self.everyone is None else self.everyone.broadcast_object

    def _is_equal_on_all_ranks(self, number: float) -> bool:
        """Whether all ranks pass the same number. All ranks must call this method."""
        assert self.everyone is not None
        return len({row[0] for row in self.everyone.gather_numbers([number])}) == 1

    def _raise_or_warn(self, message: str) -> None:
        """Raise `DataError`, or warn once if the loading rules allow different data on different ranks.

        Args:
            message: Text of the error or warning.
        """
        if self.rules.raises_for_unequal_data:
            raise DataError(message)
        log.warning_once("%s", message)


def _is_stream(loader: DataLoader[Any]) -> bool:
    return isinstance(loader.dataset, IterableDataset)


def choose_loader_class(loader: DataLoader[Any], config: DataLoaderConfiguration) -> type[DataLoader[Any]]:
    """Return the DataLoader class that reads the dataset.

    It is torchdata's StatefulDataLoader if the configuration requests it, or the class of `loader` if that is one of
    torchdata's stateful classes. Otherwise it is torch's DataLoader.

    Args:
        loader: User's loader.
        config: Loader configuration of the run.

    Raises:
        OptionalDependencyMissing: If the configuration requests torchdata's loader and torchdata is not installed.
    """
    if config.use_stateful_dataloader:
        module = require("torchdata.stateful_dataloader", "use_stateful_dataloader=True needs", "headway[stateful]")
        return module.StatefulDataLoader  # type: ignore[no-any-return]
    if hasattr(loader, "state_dict") and type(loader).__module__.startswith("torchdata."):
        return type(loader)
    return DataLoader
