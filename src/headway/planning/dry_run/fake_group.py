"""Run one rank of any layout in this process alone, on a process group that sends nothing.

`run_as_rank` prepares the model as a run would, with collectives that transfer no data (`FakeCollectives`).
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from headway.core.config.engines import EngineOptions
from headway.core.config.mesh import Layout
from headway.core.precision.mixed import halve_embeddings
from headway.core.runtime.device import CPU
from headway.core.runtime.process import ProcessRuntime
from headway.core.strategies.base import Strategy
from headway.core.strategies.build import build_strategy
from headway.core.training.prepared.model import attach_engine
from headway.errors import StateError, UnsupportedError
from headway.extras.activation_checkpointing import checkpoint_activations
from headway.planning.dry_run.boxes import RankBoxes
from headway.planning.dry_run.fake_collectives import FakeCollectives, FakeStageGroup, PeerObjects
from headway.planning.dry_run.tensor_modes import SharedChunks


def require_no_group() -> None:
    """Raise StateError if this process has joined a process group, because no dry run is possible then."""
    if dist.is_initialized():
        raise StateError(
            "a plan, or a forecast of a layout, needs a process that has not joined a process group; call headway.plan() or "
            "headway.forecast() before you create an Accelerator, or run `headway plan` or `headway estimate`"
        )


def refuse_parameter_offload(options: EngineOptions) -> None:
    """Raise UnsupportedError if the options offload parameters to host memory."""
    if options.sharding is not None and options.sharding.cpu_offload:
        raise UnsupportedError(
            "ShardingOptions(cpu_offload=True) cannot be forecast or planned: a trace does not distinguish host memory from "
            "device memory; leave it out"
        )


@contextmanager
def join_fake_group(num_ranks: int, rank: int) -> Iterator[None]:
    """Return a context in which this process acts as rank `rank` of `num_ranks`.

    Within the context, collectives return immediately and transfer no data.

    Raises:
        StateError: If this process has already joined a process group. That group is not changed.
    """
    require_no_group()
    # This import registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def run_as_rank(
    model: nn.Module,
    layout: Layout,
    rank: int,
    machine_ranks: int,
    precision: str,
    options: EngineOptions,
    peer_objects: PeerObjects | None = None,
    device_type: str = "cpu",
) -> Iterator[Strategy | None]:
    """Return a context in which this process is one rank of a run, and the model is distributed over all ranks.

    The context yields the layout's strategy, or None for replicas. Replicas have no strategy, because DDP's engine
    would read tensor values.

    Args:
        model: Model of fake tensors.
        layout: Layout of the run.
        rank: Rank to run as.
        machine_ranks: Ranks per machine.
        precision: "no", "bf16" or "fp16".
        options: Options of the engines.
        peer_objects: Objects stored by the dry runs of other pipeline ranks, or None for a layout without pipeline
            stages.
        device_type: Device type of the ranks in the real run.

    Raises:
        PrepareError: If the model cannot be sharded.
        StateError: If this process has joined a process group.
        UnsupportedError: If the layout is not supported.
    """
    num_ranks, strategy = layout.num_ranks, None
    with join_fake_group(num_ranks, rank):
        if not layout.is_replicas_only:
            local_rank, local_size = rank % machine_ranks, min(machine_ranks, num_ranks)
            runtime = ProcessRuntime(
                rank, num_ranks, local_rank, local_size, CPU, torch.device("cpu"), owns_group=False
            )
            collectives = FakeCollectives(runtime) if peer_objects is None else FakeStageGroup(runtime, peer_objects)
            collectives.boxes = RankBoxes(layout)
            strategy = build_strategy(collectives, options, layout, precision, device_type=device_type)
        distribute_model(model, strategy, options, device_type)
        try:
            yield strategy
        finally:
            if strategy is not None:
                strategy.release_model()
            del strategy
            gc.collect()  # engines and models form reference cycles, which would stay in memory with the next model


def distribute_model(
    model: nn.Module, strategy: Strategy | None, options: EngineOptions, device_type: str = "cpu"
) -> None:
    """Transform and shard the model in place, in the same way as `prepare`.

    Args:
        model: Model of fake tensors.
        strategy: Strategy that shards the model, or None to leave it unsharded.
        options: Options of the engines.
        device_type: Device type of the ranks in the real run.

    Raises:
        PrepareError: If the model cannot be sharded.
    """
    transforms: list[Callable[[nn.Module], Any]] = [halve_embeddings] if options.autocast.half_residual else []
    if options.checkpointing is not None:
        device = torch.device(device_type)
        transforms.append(partial(checkpoint_activations, plan=options.checkpointing, device=device))
    if strategy is None:
        for transform in transforms:
            transform(model)
        return
    with SharedChunks():
        engine = strategy.setup_model(model, transforms)
    attach_engine(model, engine, None)
