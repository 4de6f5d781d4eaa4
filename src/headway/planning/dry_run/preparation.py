"""A model without memory, spread over ranks by the strategy that a run would use."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from headway.config.engines import EngineOptions
from headway.config.mesh import Layout
from headway.planning.dry_run.fake_collectives import FakeCollectives, FakeStageGroup, PeerAnswer
from headway.planning.dry_run.fake_group import OneOfEach, pretend
from headway.runtime.device import CPU
from headway.runtime.process import ProcessRuntime
from headway.strategies.base import Strategy
from headway.strategies.build import build_strategy
from headway.training.prepared.model import attach
from headway.training.transforms.activation_checkpointing import checkpoint_activations


@contextmanager
def as_rank(
    model: nn.Module,
    layout: Layout,
    rank: int,
    machine_ranks: int,
    precision: str,
    options: EngineOptions,
    told: PeerAnswer | None = None,
    computes_on: str = "cpu",
) -> Iterator[Strategy | None]:
    """A block in which this process is one rank of a run, and the model is spread over all of them.

    Gives the layout's strategy; None for replicas: DDP's engine reads values.

    Args:
        model: of fake tensors.
        layout: of the run.
        rank: which of its ranks.
        machine_ranks: ranks on one machine.
        precision: "no", "bf16" or "fp16".
        options: of the engines.
        told: by the other ranks of a pipeline.
        computes_on: the type of the device that the real ranks have.

    Raises:
        PrepareError: a model that cannot be sharded.
        StateError: this process has a group of its own.
        UnsupportedError: a layout that is not there yet.
    """
    num_ranks, strategy = layout.num_ranks, None
    with pretend(num_ranks, rank):
        if not layout.is_replicas_only:
            machine = rank % machine_ranks, min(machine_ranks, num_ranks)
            here = ProcessRuntime(rank, num_ranks, *machine, CPU, torch.device("cpu"), owns_group=False)
            everyone = FakeCollectives(here) if told is None else FakeStageGroup(here, told)
            strategy = build_strategy(everyone, options, layout, precision, computes_on=computes_on)
        spread(model, strategy, options, computes_on)
        try:
            yield strategy
        finally:
            if strategy is not None:
                strategy.release()
            del strategy
            gc.collect()  # engines hold their models in circles, and the next model would come on top


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
