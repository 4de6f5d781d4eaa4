"""Loaders prepared by a function, without an Accelerator's `prepare`."""

from typing import Any

import torch
from torch.utils.data import DataLoader

from headway.compat.accelerate.state import PartialState
from headway.config.run import DataLoaderConfiguration
from headway.data.build import prepare_loader
from headway.data.feeds.dispatch import DispatchFeed
from headway.data.loader import LoaderEvents, PreparedLoader
from headway.data.sampling.draws import LoaderStream
from headway.data.sampling.shard import ShardIndex
from headway.errors import ConfigError, UnsupportedError
from headway.runtime.collectives.checked import Collectives
from headway.training.run import AcceleratorRun


class _Dispatching(type):
    """Answers `isinstance`."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, PreparedLoader) and isinstance(instance._feed, DispatchFeed)


class DataLoaderDispatcher(metaclass=_Dispatching):
    """For `isinstance`: a prepared loader whose data rank 0 alone reads.

    Raises:
        UnsupportedError: when one is built; `prepare_data_loader(loader, dispatch_batches=True)` gives such a loader.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(
            "DataLoaderDispatcher is for isinstance() only; prepare_data_loader(loader, dispatch_batches=True) gives such a loader"
        )


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
    windows = None if AcceleratorRun.latest is None else AcceleratorRun.latest.accumulation
    return prepare_loader(
        dataloader,
        shard=shard,
        config=DataLoaderConfiguration(
            split_batches=split_batches,
            dispatch_batches=dispatch_batches,
            even_batches=even_batches,
            use_seedable_sampler=use_seedable_sampler,
            data_seed=data_seed,
            non_blocking=non_blocking or None,
            use_stateful_dataloader=use_stateful_dataloader,
        ),
        device=(device or state.device) if put_on_device else None,
        collectives=Collectives(state.runtime) if is_run else None,
        events=LoaderEvents() if windows is None else LoaderEvents(active=windows.active),
        seed=torch.initial_seed() if data_seed is None else data_seed,
        rng_types=("generator",) if rng_types is None else [str(each) for each in rng_types],
        stream=LoaderStream(is_private=count > 1),
    )
