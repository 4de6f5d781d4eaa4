"""`LoadingRules`, by which a run's loaders order, read and split data. A subclass implements Accelerate's rules."""

from dataclasses import dataclass
from typing import Any

from torch.utils.data import SequentialSampler

from headway.core.config.run import DataLoaderConfiguration
from headway.core.data.loader import PreparedLoader
from headway.core.data.sampling.loader_generator import LoaderGenerator
from headway.core.data.sampling.order import DrawnOrder, PureOrder, SampleOrder, is_plain_shuffling
from headway.core.data.sampling.rng import Broadcast
from headway.core.data.sampling.sampler_order import SamplerOrder


@dataclass(frozen=True)
class RandomSource:
    """Settings and random number stream with which a loader's sample order is drawn.

    Attributes:
        config: Loader configuration of the run.
        seed: Seed of this loader's order, equal on all ranks.
        stream: Random number stream from which the run's loaders draw.
        broadcast: Function that returns rank 0's value on every rank; None if this process draws alone.
        is_synchronized: Whether random generators in samplers start each epoch with rank 0's state.
    """

    config: DataLoaderConfiguration
    seed: int
    stream: LoaderGenerator
    broadcast: Broadcast | None
    is_synchronized: bool


class LoadingRules:
    """Rules by which a run's loaders order, read and split data. The defaults follow torch's loaders.

    Attributes:
        reads_ahead: Whether to fetch the next batch of a map-style dataset before training on the current one. It
            applies to loaders without workers. Fetching a batch then draws from the global generators before training
            on the previous batch does.
        keeps_torch_worker_seeds: Whether workers keep torch's seeding even with several ranks. Otherwise their random
            numbers are functions of a sample's position, so that a resumed epoch is equal on any number of ranks.
        draws_order_late: Whether a pass draws its order when the first batch is requested. Otherwise it does so in
            `iter()`, as torch's loaders do.
        separates_rng_streams: Whether loaders and training draw from separate random number streams in a run with
            several ranks.
        raises_for_unequal_data: Whether different data or samplers on different ranks raise `DataError`. Otherwise they
            cause one warning.
        compares_iterable_datasets: Whether ranks that each read an iterable dataset in full compare their samples, read
            with equal global RNG states, and end a pass together. Otherwise they exchange nothing.
    """

    reads_ahead = False
    keeps_torch_worker_seeds = False
    draws_order_late = False
    separates_rng_streams = True
    raises_for_unequal_data = True
    compares_iterable_datasets = True

    def choose_order(self, sampler: Any, draws: RandomSource) -> SampleOrder:
        """Return the order of a sampler.

        It is a `PureOrder` or `DrawnOrder` for torch's plain samplers, else a `SamplerOrder`.

        Args:
            sampler: Sampler or batch sampler.
            draws: Source of random numbers for the order, and its settings.
        """
        is_seedable, is_shuffled = draws.config.is_seedable, is_plain_shuffling(sampler)
        if type(sampler) is SequentialSampler or (is_shuffled and is_seedable):
            return PureOrder(sampler, is_shuffled, draws.seed)
        if is_shuffled:
            return DrawnOrder(sampler, draws.stream, draws.broadcast)
        return SamplerOrder(sampler, draws.seed, is_seedable, draws.stream, draws.broadcast, draws.is_synchronized)

    def wrap_loader(self, config: DataLoaderConfiguration, **parts: Any) -> PreparedLoader:
        """Create a prepared loader from its components.

        Args:
            config: Loader configuration of the run.
            parts: Keyword arguments of `PreparedLoader`.
        """
        return PreparedLoader(**parts)

    def has_seeded_order(self, config: DataLoaderConfiguration) -> bool:
        """Whether the sample order and the workers' RNG states are functions of (seed, epoch).

        Otherwise they are drawn from the run's random number stream.

        Args:
            config: Loader configuration of the run.
        """
        return config.is_seedable

    def should_dispatch(self, config: DataLoaderConfiguration, is_stream: bool, is_placed: bool) -> bool:
        """Whether rank 0 reads the data and sends each rank its batch.

        Args:
            config: Loader configuration of the run.
            is_stream: Whether the dataset is iterable.
            is_placed: Whether batches are moved to the device.
        """
        return bool(config.dispatch_batches)

    def should_spread_last_step(self, is_dispatched: bool) -> bool:
        """Whether the samples of an incomplete last step are spread evenly over the ranks, as short batches.

        Otherwise the first ranks get full batches.

        Args:
            is_dispatched: Whether rank 0 reads the data and sends each rank its batch.
        """
        return False
