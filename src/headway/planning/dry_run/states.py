"""Measure how many bytes of optimizer state a dry run has for each parameter, and which rank has them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim

from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from headway.core.training.forecast_types import MakeOptimizer
from headway.forecasting.tracing.tensors import iterate_plain_tensors
from headway.layouts.low_bit.states import describe_export
from headway.planning._torch import FakeTensorMode, disable_current_modes, tree_leaves
from headway.planning.dry_run.updates import DryRunUpdates


@dataclass(frozen=True)
class StateBytes:
    """Bytes of the optimizer state of one parameter.

    Attributes:
        per_element: Bytes per element of the parameter on a rank, or per element of the full parameter if one rank owns
            its state.
        fixed: Bytes that do not depend on the parameter's size, such as those of a step count.
        owner: Rank that owns the state of the full parameter. None if each rank has the state of its shard.
        saved_per_element: Bytes per element in a checkpoint, which contains the values of low-bit states in float32. None
            (the default): as many as `per_element`.
    """

    per_element: int
    fixed: int
    owner: int | None = None
    saved_per_element: int | None = None

    @property
    def checkpoint_bytes_per_element(self) -> int:
        """Bytes per element in a checkpoint."""
        return self.per_element if self.saved_per_element is None else self.saved_per_element


def describe_states(
    parameters: Sequence[torch.Tensor],
    optimizer: optim.Optimizer,
    make_optimizer: MakeOptimizer,
    updates: DryRunUpdates,
    num_ranks: int,
) -> tuple[StateBytes, ...]:
    """Return the bytes of each parameter's optimizer state, in the order of `parameters`.

    Some optimizers update a full parameter on one rank, its owner, and only the owner has the state. If any parameter
    has another rank as owner, the bytes of all states are measured in a separate update of full parameters.

    Args:
        parameters: Parameters on this rank.
        optimizer: Optimizer that has stepped.
        make_optimizer: Function that makes the optimizer from a list of parameters.
        updates: Object that made the optimizer's updates, and that determines the owners.
        num_ranks: World size.
    """
    owners, rank = updates.find_owners(optimizer, num_ranks), _get_rank()
    if any(owner != rank for owner in owners.values()):
        # Parameters without owner are measured, too, because this rank's shard of them can be empty.
        full_states = _measure_full_states(parameters, make_optimizer)
        return tuple(
            _describe_state(parameter.shape, state, owners.get(parameter))
            for parameter, state in zip(parameters, full_states)
        )
    described: list[StateBytes] = []
    for parameter in parameters:
        # An owner has the state of the full parameter, and all other ranks have that of their shards.
        shape = parameter.shape if parameter in owners else get_local_shard(parameter).shape
        state = optimizer.state.get(parameter, {})
        in_memory = _describe_state(shape, state, owners.get(parameter))
        exported = describe_export(optimizer, state)
        if exported is not state:
            saved_per_element = _describe_state(shape, exported, owners.get(parameter)).per_element
            in_memory = replace(in_memory, saved_per_element=saved_per_element)
        described.append(in_memory)
    return tuple(described)


def count_state_bytes(parameters: Sequence[torch.Tensor], states: Sequence[StateBytes]) -> int:
    """Return the bytes of optimizer state on this rank.

    Args:
        parameters: Parameters on this rank.
        states: Bytes of each parameter's optimizer state.
    """
    rank, num_bytes = _get_rank(), 0
    for parameter, state in zip(parameters, states):
        if state.owner is None:
            num_bytes += get_local_shard(parameter).numel() * state.per_element + state.fixed
        elif state.owner == rank:
            num_bytes += parameter.numel() * state.per_element + state.fixed
    return num_bytes


def _get_rank() -> int:
    """Return the global rank of this process, or 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def _describe_state(shape: torch.Size, state: dict[str, Any], owner: int | None) -> StateBytes:
    """Return the bytes of a parameter's optimizer state.

    State tensors of the shape of the parameter are counted in bytes per element. All other state is counted as a fixed
    number of bytes.

    Args:
        shape: Shape of the parameter that the state belongs to: this rank's shard, or the full parameter.
        state: State of the parameter.
        owner: Rank that owns the state, or None.
    """
    per_element = fixed = 0
    for leaf in tree_leaves(dict(state)):
        if isinstance(leaf, torch.Tensor):
            local = get_local_shard(leaf)
            size = sum(part.nbytes for part in iterate_plain_tensors(local))  # of codes and scales, if it is quantized
            if local.shape == shape and local.numel() > 0:
                per_element += size // local.numel()
                fixed += size % local.numel()
            else:
                fixed += size
    return StateBytes(per_element, fixed, owner)


def _measure_full_states(parameters: Sequence[torch.Tensor], make_optimizer: MakeOptimizer) -> list[dict[str, Any]]:
    """Return the optimizer state of each full parameter, as tensors without values.

    Args:
        parameters: Parameters or shards.
        make_optimizer: Function that makes the optimizer.
    """
    with disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True):
        full = [nn.Parameter(torch.empty(each.shape, dtype=each.dtype), each.requires_grad) for each in parameters]
        trainable = [each for each in full if each.requires_grad]
        for parameter in trainable:
            parameter.grad = torch.empty_like(parameter)
        optimizer = make_optimizer(trainable)
        DryRunUpdates().step_optimizer(optimizer)
    return [optimizer.state.get(each, {}) for each in full]
