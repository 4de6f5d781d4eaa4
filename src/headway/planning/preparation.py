"""A model without memory, spread over ranks by the strategy that a run would use."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from headway.collectives.door import Collectives
from headway.config.mesh import Layout
from headway.config.strategies import EngineOptions
from headway.errors import UnsupportedError
from headway.planning.pretence import OneOfEach
from headway.recompute.checkpointing import checkpoint_activations
from headway.runtime.device import CPU
from headway.runtime.process import ProcessRuntime
from headway.strategies.base import Strategy
from headway.strategies.build import build_strategy


class Echoes(Collectives):
    """Exchanges of a rank whose peers are not there: each of them would say what this one says, and values are nowhere."""

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        """This rank alone: nobody asks its part anything in a preparation."""
        return Echoes(self.runtime, is_alone=True)

    def gather_numbers(self, values: Sequence[float], operation: str = "numbers") -> list[list[float]]:
        """These, for every rank."""
        return [list(values)] * self.world_size

    def barrier(self) -> None:
        """Nobody is waited for."""

    def broadcast_into(self, found: Sequence[torch.Tensor], src: int = 0) -> None:
        """Nothing travels."""

    def broadcast_in_place(self, found: Sequence[torch.Tensor], src: int = 0) -> None:
        """Nothing travels."""

    def sum_in_place(self, found: Sequence[torch.Tensor]) -> None:
        """Nothing travels."""

    def gather_objects(self, obj: Any) -> list[Any]:
        """This one, for every rank."""
        return [obj] * self.world_size

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """This one."""
        return obj


def chosen(
    layout: Layout, machine_ranks: int, precision: str, options: EngineOptions, computes_on: str = "cpu"
) -> Strategy | None:
    """The layout's strategy on the process group that there is; None for replicas: DDP's engine reads values.

    Args:
        layout: of all ranks of the group.
        machine_ranks: ranks on one machine.
        precision: "no", "bf16" or "fp16".
        options: of the engines.
        computes_on: the type of the device that the real ranks have.

    Raises:
        UnsupportedError: a layout that is not there yet.
    """
    if layout.is_replicas_only:
        return None
    if layout.pp > 1:
        raise UnsupportedError(
            "pipeline stages cannot be planned yet: ranks hold different blocks; plan one stage as a model of its own"
        )
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    here = ProcessRuntime(
        rank,
        num_ranks,
        rank % machine_ranks,
        min(machine_ranks, num_ranks),
        CPU,
        torch.device("cpu"),
        owns_group=False,
    )
    return build_strategy(Echoes(here), options, layout, precision, computes_on=computes_on)


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
        strategy.setup(model, transforms)
