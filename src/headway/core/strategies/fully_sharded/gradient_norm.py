"""Norm of sharded gradients over all ranks."""

import math
from collections.abc import Iterable
from typing import Any

import torch

from headway.core.runtime.collectives.checked import Collectives
from headway.core.strategies._torch import foreach_norm
from headway.core.strategies.fully_sharded.dtensors import complete_gradient, get_local_shard
from headway.core.weights.pieces import is_dtensor
from headway.errors import UnsupportedError

_ShardBatches = dict[tuple[int, torch.device, torch.dtype], list[torch.Tensor]]
"""Shards by (number of ranks that hold a copy, device, dtype). One kernel computes the norms of all shards of a key."""


def count_copies(tensor: torch.Tensor, num_ranks: int) -> int:
    """Return how many of `num_ranks` ranks store each element of the tensor."""
    if not is_dtensor(tensor):
        return num_ranks
    mesh: Any = tensor.device_mesh
    split_sizes: list[int] = [
        mesh.size(axis) for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()
    ]
    return num_ranks // math.prod(split_sizes)


def compute_total_norm(
    parameters: Iterable[torch.Tensor], norm_type: float, everyone: Collectives, num_holders: int | None = None
) -> torch.Tensor:
    """Return the norm of all gradients as a plain 0-d tensor, equal on all ranks. Requires one collective.

    Each element counts once, even if several ranks hold copies of it. A non-finite gradient on one rank enters the
    result on all ranks.

    Args:
        parameters: Parameters whose gradients are measured.
        norm_type: Order of the norm; 2 for the Euclidean norm.
        everyone: Collectives over the ranks that hold the gradients.
        num_holders: Number of ranks that hold this rank's parameters or shards of them. If None, all ranks hold them.
    """
    if norm_type == 0:
        return _count_nonzero(list(parameters), everyone, num_holders)
    grads = [grad for grad in map(complete_gradient, parameters) if grad is not None]
    shards = [get_local_shard(grad) for grad in grads]
    result_dtype = torch.float32
    for shard in shards:
        result_dtype = torch.promote_types(result_dtype, shard.dtype)
    batches: _ShardBatches = {}
    for grad, shard in zip(grads, shards):
        if shard.numel():
            key = count_copies(grad, num_holders or everyone.world_size), shard.device, shard.dtype
            batches.setdefault(key, []).append(shard.detach())
    default_device = torch.device("cpu") if num_holders is None else everyone.runtime.device
    device = _choose_sum_device(shards, default_device)
    total = _combine_norms(batches, norm_type, device)
    return _reduce_over_ranks(total, norm_type, everyone).to(result_dtype)


def _choose_sum_device(shards: list[torch.Tensor], default: torch.device) -> torch.device:
    """Return the device on which the norms of gradients are combined.

    It is the device of the gradients. If they are on several devices (some may be offloaded), it is the CPU.

    Args:
        shards: This rank's shards of the gradients.
        default: Device to use if this rank has no gradients.
    """
    if not shards:
        return default
    device = shards[-1].device
    is_mixed = any(shard.device != device for shard in shards if shard.numel())
    return torch.device("cpu") if is_mixed else device


def _combine_norms(batches: _ShardBatches, norm_type: float, device: torch.device) -> torch.Tensor:
    """Return this rank's sum of powers, or its maximum or minimum for an infinite `norm_type`, as a 0-d tensor.

    Args:
        batches: Shards of the gradients.
        norm_type: Order of the norm.
        device: Device of the result.
    """
    # The minimum over no elements is infinite, so that a rank without a shard does not determine the result.
    start = math.inf if norm_type == -math.inf else 0.0
    total = torch.full((), start, dtype=choose_norm_dtype(device), device=device)
    for (num_copies, _, dtype), shards in batches.items():
        compute_dtype = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
        norms = torch.stack(foreach_norm(shards, norm_type, dtype=compute_dtype)).to(device, total.dtype)
        if norm_type == math.inf:
            total = torch.maximum(total, norms.max())
        elif norm_type == -math.inf:
            total = torch.minimum(total, norms.min())
        else:
            # Each of the ranks that hold a copy adds an equal share of the term.
            total = total + norms.pow(norm_type).sum() / num_copies
    return total


def _count_nonzero(parameters: list[torch.Tensor], everyone: Collectives, num_holders: int | None) -> torch.Tensor:
    """Return the norm of type 0 as torch defines it: the number of gradients with a nonzero element. This is a collective.

    Args:
        parameters: Parameters with the gradients.
        everyone: Collectives over all ranks.
        num_holders: In a pipeline, the number of ranks that hold each parameter. None: every rank holds all parameters.

    Raises:
        UnsupportedError: In a pipeline with sharded stages, where no rank knows which shards belong to one parameter.
    """
    grads = [complete_gradient(parameter) for parameter in parameters]
    if num_holders is not None and any(is_dtensor(grad) for grad in grads):
        raise UnsupportedError("norm_type=0 is not supported in a pipeline with sharded stages; give another norm_type")
    flags = torch.tensor([0.0 if grad is None else float(get_local_shard(grad).count_nonzero() > 0) for grad in grads])
    if num_holders is not None:
        total = flags.sum().reshape(1) / num_holders
        everyone.sum_in_place([total])
        return total.reshape(())
    everyone.sum_in_place([flags])
    return (flags > 0).sum().float()


def _reduce_over_ranks(total: torch.Tensor, norm_type: float, everyone: Collectives) -> torch.Tensor:
    """Return the norm over all ranks.

    Args:
        total: This rank's sum of powers, or its maximum or minimum for an infinite `norm_type`. A 0-d tensor.
        norm_type: Order of the norm.
        everyone: Collectives over the ranks that hold the gradients.
    """
    if math.isinf(norm_type):
        # A backend's maximum may ignore NaN, so send an additional number that shows a value that is not allowed: NaN, or
        # also infinity for a maximum. The minimum is the maximum of the negated values. torch's norm of no gradients is 0.
        sign = 1.0 if norm_type > 0 else -1.0
        is_bad = ~total.isfinite() if norm_type > 0 else total.isnan()
        pair = torch.stack([sign * total.nan_to_num(nan=0.0, posinf=math.inf), is_bad.to(total.dtype)])
        highest, any_bad = everyone.reduce(pair, "max")
        result = sign * highest
        if norm_type < 0:
            is_without_gradients = result.isinf() & (any_bad == 0)
            result = torch.where(is_without_gradients, torch.zeros_like(result), result)
        return torch.where(any_bad > 0, torch.full_like(result, math.nan), result)
    total = total.reshape(1)
    everyone.sum_in_place([total])
    return total.reshape(()).pow(1.0 / norm_type)


def choose_norm_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for sums of squares: float64, or float32 on devices without it. Large norms overflow float32."""
    return torch.float32 if device.type == "mps" else torch.float64
