"""Accelerate's data loaders, as returned by `prepare_data_loader` and by an Accelerator with Accelerate's rules.

With `use_seedable_sampler`, torch shuffles with a generator that is seeded with the seed plus the epoch number in each
epoch. Otherwise one process shuffles like plain torch, and several processes share a generator state that is seeded
when the loader is prepared. The next batch is fetched before the current one is returned. Rank 0 reads iterable
datasets for all ranks unless `dispatch_batches=False`. The last batches of such datasets have equal size on all ranks.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from headway.compat.accelerate.state import GradientState, PartialState, count_remainder
from headway.core.config.run import DataLoaderConfiguration
from headway.core.data.batch_reads import BatchReads
from headway.core.data.build import prepare_loader
from headway.core.data.choose_feed import choose_loader_class
from headway.core.data.feeds.dispatch import DispatchFeed
from headway.core.data.feeds.protocol import State
from headway.core.data.loader import LoaderEvents, PreparedLoader
from headway.core.data.loading_rules import LoadingRules, RandomSource
from headway.core.data.sampling.loader_generator import LoaderGenerator
from headway.core.data.sampling.order import SampleOrder, draw_permutation
from headway.core.data.sampling.position import Position
from headway.core.data.sampling.shard import ShardIndex
from headway.core.runtime.collectives.checked import Collectives
from headway.core.training.facts import AcceleratorFacts
from headway.errors import ConfigError, UnsupportedError


class _AcceleratePosition(Position):
    """Position in a loader's data, with epochs counted as in Accelerate.

    If a loop over the loader ends early, the next loop belongs to the same epoch.
    """

    @property
    def next_epoch(self) -> int:
        """Number of the epoch that the next loop reads. It is the current epoch if the last loop ended early."""
        return self.epoch if self.was_left_early and self._requested_next_epoch is None else super().next_epoch


class _AccelerateLoader(PreparedLoader):
    """Prepared loader with the attributes of Accelerate's loaders.

    A `DataLoaderShard` that a script constructs directly does not split its data among ranks. A `DataLoaderDispatcher`
    does.

    Args:
        dataset, kwargs: Arguments of DataLoader.
        device: Device to move batches to. None: batches are not moved.
        rng_types, synchronized_generator: Ignored. A loader that is constructed directly synchronizes no random number
            generators.
        skip_batches: Number of batches to skip in the first pass over the loader. Default: 0.
        use_stateful_dataloader: Whether torchdata's StatefulDataLoader reads the data. Default: False.
        _drop_last, _non_blocking, torch_device_mesh: Ignored.
    """

    _is_accelerate_prepared = True
    rng_types: Any = ()
    _dispatches = False

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: Any = None,
        synchronized_generator: Any = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        **kwargs: Any,
    ) -> None:
        # Only the dispatching loader has this argument. torch's DataLoader would refuse it.
        split_batches = bool(self._dispatches and kwargs.pop("split_batches", False))
        loader = prepare_data_loader(
            DataLoader(dataset, **kwargs),
            device,
            None if self._dispatches else 1,
            None if self._dispatches else 0,
            split_batches=split_batches,
            put_on_device=device is not None,
            rng_types=(),
            dispatch_batches=self._dispatches,
            use_stateful_dataloader=use_stateful_dataloader,
        )
        # `prepare_data_loader` has created the loader with all its components. Take them over instead of wrapping it.
        vars(self).update(vars(loader), _num_skipped=skip_batches, rng_types=rng_types or [])

    @classmethod
    def from_parts(cls, config: DataLoaderConfiguration, **parts: Any) -> "_AccelerateLoader":
        """Create a loader from the components that `prepare` has built for it.

        Args:
            config: Loader configuration of the run.
            parts: Keyword arguments of `PreparedLoader`.
        """
        loader = object.__new__(cls)
        PreparedLoader.__init__(loader, **parts)
        loader._config, loader.pass_position = config, _AcceleratePosition()
        return loader

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute on this wrapper only. As in Accelerate, it does not affect how the loader reads its data."""
        object.__setattr__(self, name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return the function that recreates the loader, and its arguments, for pickling.

        The unpickled loader starts at the first epoch.
        """
        return _prepare_for_shard, (self._user_loader, self._config, self._shard, self.device)

    @property  # type: ignore[misc]  # it cannot be assigned
    def __class__(self) -> Any:
        """Class that `isinstance` checks in scripts see.

        It is torchdata's StatefulDataLoader if that class reads the data, else the loader's own class.
        """
        return choose_loader_class(self._user_loader, self._config) if self.use_stateful_dataloader else type(self)

    @property
    def base_dataloader(self) -> DataLoader[Any]:
        """DataLoader that the script passed to `prepare`."""
        return self._user_loader

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current or most recent batch is the last of its pass."""
        return self.is_last

    @property
    def remainder(self) -> int:
        """Number of samples in the loader's last global batch if that batch is incomplete, not counting padding.

        0 if the last global batch is complete. -1 if the number is not known yet, or if incomplete batches are dropped.
        """
        return -1 if self.has_no_batch_yet or self.drop_last else count_remainder(self)

    @property
    def iteration(self) -> int:
        """Number of the current pass over the loader; between passes, the number of the next one. Can be assigned."""
        return self.epoch

    @iteration.setter
    def iteration(self, value: int) -> None:
        self.set_epoch(value)

    @property
    def gradient_state(self) -> GradientState:
        """State of the accumulation windows of the Accelerator that was created last."""
        return GradientState()

    @property
    def skip_batches(self) -> int:
        """Number of batches that the next pass over the loader skips."""
        return self._num_skipped

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether torchdata's StatefulDataLoader reads the data."""
        return choose_loader_class(self._user_loader, self._config) is not DataLoader


class DataLoaderShard(_AccelerateLoader):
    """Prepared loader in which each rank reads its own shard of the data."""


class DataLoaderDispatcher(_AccelerateLoader):
    """Prepared loader whose data the main process reads for all ranks."""

    _dispatches = True


class ShardRules(LoadingRules):
    """Loading rules of `prepare_data_loader`, which returns Accelerate's loader classes.

    Rank 0 reads iterable datasets for all ranks, unless `dispatch_batches=False`.
    """

    raises_for_unequal_data = False
    compares_iterable_datasets = False

    def should_dispatch(self, config: DataLoaderConfiguration, is_stream: bool, is_placed: bool) -> bool:
        """Whether rank 0 reads the data for all ranks.

        The value of `dispatch_batches` decides if it is set. Otherwise rank 0 reads iterable datasets whose batches
        are moved to the device.

        Args:
            config: Loader configuration of the run.
            is_stream: Whether the dataset is iterable.
            is_placed: Whether batches are moved to the device.
        """
        if config.dispatch_batches is None:
            return is_stream and is_placed
        return config.dispatch_batches

    def should_spread_last_step(self, is_dispatched: bool) -> bool:
        """Whether an incomplete last global batch is split evenly among the ranks.

        This is the case if rank 0 reads the data for all ranks.

        Args:
            is_dispatched: Whether rank 0 reads the data for all ranks.
        """
        return is_dispatched

    def wrap_loader(self, config: DataLoaderConfiguration, **parts: Any) -> PreparedLoader:
        """Return a new `DataLoaderDispatcher` if rank 0 reads for all ranks, else a new `DataLoaderShard`.

        Args:
            config: Loader configuration of the run.
            parts: Keyword arguments of `PreparedLoader`.
        """
        is_iterable = isinstance(parts["user_loader"].dataset, IterableDataset)
        moves_batches = parts["device"] is not None
        dispatches = isinstance(parts["feed"], DispatchFeed) or self.should_dispatch(config, is_iterable, moves_batches)
        loader_class: type[_AccelerateLoader] = DataLoaderDispatcher if dispatches else DataLoaderShard
        return loader_class.from_parts(config, **parts)


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Any = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Any = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> PreparedLoader:
    """Split a loader's data across processes, as `Accelerator.prepare` does, and return the prepared loader.

    Args:
        dataloader: Loader to prepare.
        device: Device of the batches if `put_on_device` is set. None: the device of this process.
        num_processes: Number of processes among which the data is split. None: all processes of the run.
        process_index: Index of the process whose shard is read. None: this process.
        put_on_device: Whether to move batches to the device. Default: False.
        rng_types: Names of random number generators to synchronize across ranks. None: only the generators of samplers
            ("generator"), which get rank 0's state.
        split_batches, dispatch_batches, even_batches, use_seedable_sampler, data_seed, non_blocking,
            use_stateful_dataloader: As in `DataLoaderConfiguration`, with the same defaults.
        slice_fn_for_dispatch: Must be None (the default), because batches are always sliced along dimension 0.
        torch_device_mesh: Must be None (the default), because an Accelerator has its own mesh.

    Raises:
        UnsupportedError: If `slice_fn_for_dispatch` or `torch_device_mesh` is given.
        ConfigError: If `dispatch_batches` is combined with a number of processes that differs from the run's.
    """
    if slice_fn_for_dispatch is not None or torch_device_mesh is not None:
        raise UnsupportedError(
            "prepare_data_loader takes neither slice_fn_for_dispatch (batches are split by rows) nor torch_device_mesh: use "
            "accelerator.prepare(loader), which knows the run's mesh"
        )
    state = PartialState()
    count = state.num_processes if num_processes is None else num_processes
    shard = ShardIndex(state.process_index if process_index is None else process_index, count)
    is_own_shard = count == state.num_processes and shard.index == state.process_index
    if dispatch_batches and count > 1 and not is_own_shard:
        raise ConfigError(
            f"prepare_data_loader(dispatch_batches=True, num_processes={count}) on {state.num_processes} processes; leave "
            "num_processes and process_index out, or dispatch_batches"
        )
    config = DataLoaderConfiguration(
        split_batches=split_batches,
        dispatch_batches=dispatch_batches,
        even_batches=even_batches,
        use_seedable_sampler=use_seedable_sampler,
        data_seed=data_seed,
        non_blocking=non_blocking or None,
        use_stateful_dataloader=use_stateful_dataloader,
    )
    return _prepare_for_shard(dataloader, config, shard, (device or state.device) if put_on_device else None, rng_types)


def _prepare_for_shard(
    dataloader: DataLoader[Any],
    config: DataLoaderConfiguration,
    shard: ShardIndex,
    device: torch.device | None,
    rng_types: Any = None,
) -> PreparedLoader:
    """Return a prepared loader that reads one shard. Unpickling a prepared loader calls this function, too.

    Only the shard of this rank in the current run takes part in collectives.

    Args:
        dataloader: Loader to prepare.
        config: Loader configuration.
        shard: Shard to read.
        device: Device of the batches. None: batches are not moved.
        rng_types: Names of random number generators to synchronize. None: only the generators of samplers.
    """
    state = PartialState()
    is_own_shard = shard == ShardIndex(state.process_index, state.num_processes)
    windows = None if AcceleratorFacts.latest is None else AcceleratorFacts.latest.accumulation
    return prepare_loader(
        dataloader,
        shard=shard,
        config=config,
        device=device,
        collectives=Collectives(state.runtime) if is_own_shard else None,
        events=LoaderEvents(BatchReads(active_loaders=None if windows is None else windows.reads.active_loaders)),
        seed=torch.initial_seed() if config.data_seed is None else config.data_seed,
        rng_types=("generator",) if rng_types is None else [str(each) for each in rng_types],
        stream=LoaderGenerator(is_private=shard.count > 1),
        rules=ShardRules(),
    )


# -------------------------------------------------------------------- the rules of an Accelerator


class SeededShuffle:
    """Sample order of torch's RandomSampler, with a generator that is seeded with `seed + epoch` in each epoch.

    Args:
        sampler: Original sampler.
        seed: Seed of epoch 0.
    """

    def __init__(self, sampler: RandomSampler, seed: int) -> None:
        self._sampler = sampler
        self._seed = seed

    def set_seed(self, seed: int) -> None:
        """Do nothing, because the seed of this order is fixed. In a resumed run, `load_state` restores it."""

    def draw_ahead(self) -> None:
        """Do nothing, because no random numbers are drawn in advance."""

    def draw_order(self, epoch: int) -> Sequence[int] | Iterator[int]:
        """Return the sample indices of an epoch in order, as a sequence or an iterator.

        The result is a sequence if every sample occurs exactly once.

        Args:
            epoch: Number of the epoch.
        """
        sampler, seed = self._sampler, (self._seed + epoch) % (1 << 63)
        length = len(sampler.data_source)
        if not sampler.replacement and sampler.num_samples == length:
            return draw_permutation(length, seed)  # type: ignore[return-value]
        return iter(_copy_random_sampler(sampler, torch.Generator().manual_seed(seed)))

    def __len__(self) -> int:
        return len(self._sampler)

    def state(self, is_running: bool) -> State:
        """Return the state to save in a checkpoint: a dict that contains the seed.

        Args:
            is_running: Ignored.
        """
        return {"shuffled_by": self._seed}

    def state_after_break(self) -> State:
        """Return the state to save after an epoch was left early, for example by `break`.

        It is empty, because seed and epoch determine the next order.
        """
        return {}

    def load_state(self, state: State) -> None:
        """Restore the seed from a state that `state()` returned. If it contains no seed, keep the current one."""
        self._seed = state.get("shuffled_by", self._seed)


class AccelerateRules(ShardRules):
    """Loading rules of an Accelerator that match Accelerate's sample orders, random numbers and last batches."""

    reads_ahead = True
    keeps_torch_worker_seeds = True
    draws_order_late = True
    separates_rng_streams = False

    def choose_order(self, sampler: Any, draws: RandomSource) -> SampleOrder:
        """Return the sample order for a sampler or batch sampler, shuffled as Accelerate would shuffle it.

        Args:
            sampler: Sampler or batch sampler of the script's DataLoader.
            draws: Source of random numbers for the sample order. It also holds the loader configuration.
        """
        if type(sampler) is RandomSampler:
            if draws.config.use_seedable_sampler:
                return SeededShuffle(sampler, _share_seed(draws))
            if draws.broadcast is not None and sampler.generator is None:
                sampler = _copy_random_sampler(sampler, torch.Generator().manual_seed(_draw_seed()))
        elif (
            draws.broadcast is not None
            and not draws.config.use_seedable_sampler
            and getattr(sampler, "generator", sampler) is None
        ):
            sampler = copy.copy(sampler)  # such as torch's WeightedRandomSampler
            sampler.generator = torch.Generator().manual_seed(_draw_seed())
        # Only the order of torch's RandomSampler is seedable. Other samplers draw from the current RNG streams.
        config = replace(draws.config, use_seedable_sampler=False)
        return super().choose_order(sampler, replace(draws, config=config, stream=LoaderGenerator()))

    def has_seeded_order(self, config: DataLoaderConfiguration) -> bool:
        """Whether seed and epoch alone determine an epoch's random numbers. Always False.

        torch's DataLoader also draws a base seed for its workers from the current RNG state.

        Args:
            config: Ignored.
        """
        return False


def _share_seed(draws: RandomSource) -> int:
    """Return rank 0's seed for the sample order: `data_seed`, else torch's initial seed."""
    seed = torch.initial_seed() if draws.config.data_seed is None else draws.config.data_seed
    return seed if draws.broadcast is None else int(draws.broadcast(seed))


def _copy_random_sampler(sampler: RandomSampler, generator: torch.Generator) -> RandomSampler:
    """Return a new sampler with the arguments of `sampler`, except for the generator."""
    # `_num_samples` is None if the sampler follows the length of its data.
    num_samples = sampler._num_samples
    return RandomSampler(sampler.data_source, sampler.replacement, num_samples, generator=generator)


def _draw_seed() -> int:
    """Draw a random seed from torch's global generator, as RandomSampler does for each epoch."""
    return int(torch.empty((), dtype=torch.int64).random_().item())
