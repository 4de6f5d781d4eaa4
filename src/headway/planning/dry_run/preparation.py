"""A model without memory, spread over ranks by the strategy that a run would use."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from headway.config.layout.mesh import Layout
from headway.config.strategies import EngineOptions
from headway.planning.dry_run.fake_collectives import FakeCollectives, FakeStageGroup, PeerAnswer
from headway.planning.dry_run.fake_group import OneOfEach
from headway.runtime.device import CPU
from headway.runtime.process import ProcessRuntime
from headway.strategies.base import Strategy
from headway.strategies.build import build_strategy
from headway.training.prepared.model import attach
from headway.training.recompute.checkpointing import checkpoint_activations


def chosen(
    layout: Layout,
    machine_ranks: int,
    precision: str,
    options: EngineOptions,
    told: PeerAnswer | None = None,
    computes_on: str = "cpu",
) -> Strategy | None:
    """The layout's strategy on the process group that there is; None for replicas: DDP's engine reads values.

    Args:
        layout: of all ranks of the group.
        machine_ranks: ranks on one machine.
        precision: "no", "bf16" or "fp16".
        options: of the engines.
        told: by the other ranks of a pipeline.
        computes_on: the type of the device that the real ranks have.

    Raises:
        UnsupportedError: a layout that is not there yet.
    """
    if layout.is_replicas_only:
        return None
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    here = ProcessRuntime(
        rank, num_ranks, rank % machine_ranks, min(machine_ranks, num_ranks), CPU, torch.device("cpu"), owns_group=False
    )
    everyone = FakeCollectives(here) if told is None else FakeStageGroup(here, told)
    return build_strategy(everyone, options, layout, precision, computes_on=computes_on)


def spread(model: nn.Module, strategy: Strategy | None, options: EngineOptions, computes_on: str = "cpu") -> None:
    """Shard the model in place, as `prepare` does.

    Args:
        model: of fake tensors.
        strategy: None leaves it whole.
        options: of the engines.
        computes_on: the type of the device that the real ranks have.

    Raises:
        PrepareError: a model that cannot be sharded.
    """
    transforms: list[Callable[[nn.Module], Any]] = []
    if options.checkpointing is not None:
        device = torch.device(computes_on)
        transforms.append(partial(checkpoint_activations, plan=options.checkpointing, device=device))
    if strategy is None:
        for transform in transforms:
            transform(model)
        return
    with OneOfEach():
        engine = strategy.setup(model, transforms)
    attach(model, engine, None)
