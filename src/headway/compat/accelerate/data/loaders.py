"""Accelerate's loaders: prepared by a function, without an Accelerator, or by its `prepare`, whose runs see the same batches.

Under `import accelerate`, a seedable order is torch's shuffling by a generator that each epoch seeds with the seed and its number.
Without it, one process shuffles as plain torch; several share a generator, seeded once when the loader is prepared. Batches are
fetched one ahead. What one process reads for all ranks (streams, unless `dispatch_batches=False`) ends in batches of equal size.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from headway.compat.accelerate.state import GradientState, PartialState, remainder
from headway.config.run import DataLoaderConfiguration
from headway.data.build import prepare_loader
from headway.data.feeds import State
from headway.data.feeds.dispatch import DispatchFeed
from headway.data.loader import LoaderEvents, PreparedLoader
from headway.data.sampling.order import LoaderGenerator, LoadingRules, RandomSource, SampleOrder, permutation
from headway.data.sampling.position import Position
from headway.data.sampling.shard import ShardIndex
from headway.errors import ConfigError, UnsupportedError
from headway.runtime.collectives.checked import Collectives
from headway.training.run import AcceleratorRun


class _WholePasses(Position):
    """Counts passes as Accelerate does: after one that was left, by `break` say, the same epoch begins again."""

    @property
    def following(self) -> int:
        """The epoch after this one."""
        return self.epoch if self._left_under and self._pinned is None else super().following


class _AcceleratesLoader(PreparedLoader):
    """A prepared loader with the attributes of Accelerate's; scripts may build one, which shares nothing out.

    Args:
        dataset, kwargs: for DataLoader.
        device: where batches go; None: they stay.
        rng_types, synchronized_generator: accepted; a loader built by hand synchronises no random streams.
        skip_batches: how many are left out of its first pass.
        use_stateful_dataloader: read by torchdata's loader.
        _drop_last, _non_blocking, torch_device_mesh: accepted.
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
        made = prepare_data_loader(
            DataLoader(dataset, **kwargs),
            device,
            None if self._dispatches else 1,
            None if self._dispatches else 0,
            split_batches=bool(self._dispatches and kwargs.pop("split_batches", False)),
            put_on_device=device is not None,
            rng_types=(),
            dispatch_batches=self._dispatches,
            use_stateful_dataloader=use_stateful_dataloader,
        )
        vars(self).update(vars(made), _num_skipped=skip_batches, rng_types=rng_types or [])

    @classmethod
    def of(cls, config: DataLoaderConfiguration, *parts: Any) -> "_AcceleratesLoader":
        """The loader that `prepare` makes of the parts of a `PreparedLoader`."""
        made = object.__new__(cls)
        PreparedLoader.__init__(made, *parts)
        made._config, made._position = config, _WholePasses()
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy reads the same share of a copy of the data, from the first epoch, and takes part in no run."""
        return _prepared, (self._source, self._config, self._shard, self.device)

    @property
    def base_dataloader(self) -> DataLoader[Any]:
        """The script's own."""
        return self._source

    @property
    def end_of_dataloader(self) -> bool:
        """Is the batch in hand, or was the one last given, the last of its pass?"""
        return self.is_last

    @property
    def remainder(self) -> int:
        """Real samples of the last round over all processes where that round is incomplete, else 0; -1: not known yet."""
        return -1 if self.is_fresh or self.drop_last else remainder(self)

    @property
    def iteration(self) -> int:
        """The number of the pass in progress; between two, of the next one; settable."""
        return self.epoch

    @iteration.setter
    def iteration(self, value: int) -> None:
        self.set_epoch(value)

    @property
    def gradient_state(self) -> GradientState:
        """The windows of the Accelerator created last."""
        return GradientState()

    @property
    def skip_batches(self) -> int:
        """How many are left out of the next pass."""
        return self._num_skipped

    @property
    def use_stateful_dataloader(self) -> bool:
        """Does torchdata's loader read?"""
        return type(self._feed.inner).__module__.startswith("torchdata.")


class DataLoaderShard(_AcceleratesLoader):
    """One whose ranks each read their own."""


class DataLoaderDispatcher(_AcceleratesLoader):
    """One of which Accelerate's main process reads for all."""

    _dispatches = True


class ShardRules(LoadingRules):
    """As torch's loaders, in the classes above."""

    def wrap(self, config: DataLoaderConfiguration, *parts: Any) -> PreparedLoader:
        """A loader of Accelerate's kind: one that dispatches, or one that does not."""
        is_stream = isinstance(parts[0].dataset, IterableDataset)
        dispatches = isinstance(parts[1], DispatchFeed) or self.spreads(config, is_stream)
        kind: type[_AcceleratesLoader] = DataLoaderDispatcher if dispatches else DataLoaderShard
        return kind.of(config, *parts)


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
    """Split a loader's data across processes, as `Accelerator.prepare` does.

    Args:
        dataloader: the loader.
        device: where batches go, with `put_on_device`; None: this process's.
        num_processes: among whom data are shared; None: those of the run.
        process_index: whose share this is; None: this process's.
        put_on_device: move batches.
        rng_types: with "generator", or None, samplers' own generators follow rank 0's.
        split_batches, dispatch_batches, even_batches, use_seedable_sampler, data_seed, non_blocking, use_stateful_dataloader:
            as in `DataLoaderConfiguration`.
        slice_fn_for_dispatch, torch_device_mesh: must be None: batches are cut by rows, and an Accelerator knows its mesh.

    Raises:
        UnsupportedError: one of the last two.
        ConfigError: another number of processes than the run's where they have to speak to one another.
    """
    if slice_fn_for_dispatch is not None or torch_device_mesh is not None:
        raise UnsupportedError(
            "prepare_data_loader takes neither slice_fn_for_dispatch (batches are cut by rows) nor torch_device_mesh: use "
            "accelerator.prepare(loader), which knows the run's mesh"
        )
    state = PartialState()
    count = state.num_processes if num_processes is None else num_processes
    shard = ShardIndex(state.process_index if process_index is None else process_index, count)
    is_run = count == state.num_processes and shard.index == state.process_index
    if dispatch_batches and count > 1 and not is_run:
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
    return _prepared(dataloader, config, shard, (device or state.device) if put_on_device else None, rng_types)


def _prepared(
    dataloader: DataLoader[Any],
    config: DataLoaderConfiguration,
    shard: ShardIndex,
    device: torch.device | None,
    rng_types: Any = None,
) -> PreparedLoader:
    state = PartialState()
    is_run = shard == ShardIndex(state.process_index, state.num_processes)
    windows = None if AcceleratorRun.latest is None else AcceleratorRun.latest.accumulation
    return prepare_loader(
        dataloader,
        shard=shard,
        config=config,
        device=device,
        collectives=Collectives(state.runtime) if is_run else None,
        events=LoaderEvents() if windows is None else LoaderEvents(active=windows.active),
        seed=torch.initial_seed() if config.data_seed is None else config.data_seed,
        rng_types=("generator",) if rng_types is None else [str(each) for each in rng_types],
        stream=LoaderGenerator(is_private=shard.count > 1),
        rules=ShardRules(),
    )


# -------------------------------------------------------------------- the rules of an Accelerator


class SeededShuffle:
    """torch's RandomSampler by a generator that epoch `n` seeds with `seed + n`.

    Args:
        sampler: the user's.
        seed: of epoch 0.
    """

    def __init__(self, sampler: RandomSampler, seed: int) -> None:
        self._sampler = sampler
        self._seed = seed

    def reseed(self, seed: int) -> None:
        """Nothing: `load_state` brings the seed of a run that is resumed."""

    def open(self) -> None:
        """Nothing is drawn."""

    def draw(self, epoch: int) -> Sequence[int] | Iterator[int]:
        """The epoch's order, sliceable where every sample comes once."""
        sampler, seed = self._sampler, (self._seed + epoch) % (1 << 63)
        length = len(sampler.data_source)
        if not sampler.replacement and sampler.num_samples == length:
            return permutation(length, seed)  # type: ignore[return-value]
        return iter(_with_generator(sampler, torch.Generator().manual_seed(seed)))

    def __len__(self) -> int:
        return len(self._sampler)

    def state(self, is_running: bool) -> State:
        """The seed."""
        return {"shuffled_by": self._seed}

    def load_state(self, state: State) -> None:
        """Shuffle by the seed of the run that is resumed."""
        self._seed = state.get("shuffled_by", self._seed)


class AccelerateRules(ShardRules):
    """Orders, draws and ends of streams as Accelerate's loaders have them."""

    reads_ahead = True
    leaves_workers = True
    opens_late = True
    parts_streams = False

    def order_of(self, sampler: Any, draws: RandomSource) -> SampleOrder:
        """The order that a sampler or batch sampler stands for."""
        if type(sampler) is RandomSampler:
            if draws.config.use_seedable_sampler:
                return SeededShuffle(sampler, _first_seed(draws))
            if draws.agree is not None and sampler.generator is None:
                sampler = _with_generator(sampler, torch.Generator().manual_seed(_draw()))
        elif (
            draws.agree is not None
            and not draws.config.use_seedable_sampler
            and getattr(sampler, "generator", sampler) is None
        ):
            sampler = copy.copy(sampler)  # such as torch's WeightedRandomSampler
            sampler.generator = torch.Generator().manual_seed(_draw())
        # Seedable is only torch's own shuffling; another sampler draws from the streams that it finds.
        config = replace(draws.config, use_seedable_sampler=False)
        return super().order_of(sampler, replace(draws, config=config, stream=LoaderGenerator()))

    def is_apart(self, config: DataLoaderConfiguration) -> bool:
        """Never: torch's loader below draws its base seed, whatever orders it."""
        return False

    def spreads(self, config: DataLoaderConfiguration, is_stream: bool) -> bool:
        """Where Accelerate's main process reads for all."""
        return bool(config.dispatch_batches) or (is_stream and config.dispatch_batches is None)


def _first_seed(draws: RandomSource) -> int:
    seed = torch.initial_seed() if draws.config.data_seed is None else draws.config.data_seed
    return seed if draws.agree is None else int(draws.agree(seed))


def _with_generator(sampler: RandomSampler, generator: torch.Generator) -> RandomSampler:
    # The sampler holds None where it follows its data's length.
    num_samples = sampler._num_samples
    return RandomSampler(sampler.data_source, sampler.replacement, num_samples, generator=generator)


def _draw() -> int:
    return int(torch.empty((), dtype=torch.int64).random_().item())
