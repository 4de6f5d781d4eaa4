"""Check that replicated parameters have equal gradients on all ranks of tensor parallelism.

A parameter that the plan leaves replicated might act on sharded activations: a scale within an attention, or a trained
activation function between two matrices. Its gradient then differs between ranks. Without the check, the parameter's
values would diverge between ranks without any error.
"""

import torch
import torch.distributed as dist

from headway.core.runtime.collectives.checked import Collectives
from headway.core.strategies.fully_sharded import dtensors
from headway.core.strategies.fully_sharded.gradient_norm import choose_norm_dtype
from headway.core.weights.pieces import is_dtensor
from headway.errors import PrepareError
from headway.layouts.tensor._torch import is_fake
from headway.layouts.tensor.crossings import SplitAxis

_RELATIVE_TOLERANCE = 1e-3
"""Largest accepted difference between ranks' gradients, as a fraction of the gradient's norm."""
_MAX_NAMES = 4
"""Maximum number of parameters that the error about differing gradients names."""
_TOLERANCE_OF_LARGEST = 1e-6
"""Additional tolerance for gradient differences, as a fraction of the largest gradient norm.

Some kernels need it, because they add numbers in a different order on each call.
"""
_BLOCK_SIZE = 2**22
"""Number of gradient elements that `_make_gradient_digest` converts to float64 at once."""


def compare_gradients(model: torch.nn.Module, axis: SplitAxis, everyone: Collectives) -> bool:
    """Raise an error if gradients of replicated parameters differ between ranks.

    Args:
        model: Model that is split along the axis.
        axis: Mesh axis whose ranks must have equal gradients.
        everyone: Collectives over all ranks of the run, so that all of them learn the result. Otherwise ranks of groups
            without an error would hang in the next collective.

    Returns:
        Whether any parameter on any rank has a gradient.

    Raises:
        PrepareError: On all ranks, if the gradients of replicated parameters differ within any tensor-parallel group.
    """
    replicated_grads = [
        (name, dtensors.get_local_shard(parameter.grad).detach())
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
        and is_dtensor(parameter)  # a parameter added after prepare() is a plain tensor
        and parameter.placements[-1].is_replicate()
    ]
    # A forecast on fake tensors has no values.
    has_values = bool(replicated_grads) and not is_fake(replicated_grads[0][1])
    differing = _list_differing(replicated_grads, axis) if has_values else []
    has_grads = any(parameter.grad is not None for parameter in model.parameters())
    numbers_by_rank = everyone.gather_numbers([float(len(differing)), float(has_grads)])
    counts = [int(count) for count, _ in numbers_by_rank]
    if any(counts):
        names_by_rank = everyone.gather_objects(differing[:_MAX_NAMES])
        ranks = [rank for rank, count in enumerate(counts) if count]
        count, names = counts[ranks[0]], names_by_rank[ranks[0]]
        more = " and others" if count > len(names) else ""
        raise PrepareError(
            f"the gradients of {count} parameters that the tensor-parallel plan leaves replicated differ between ranks "
            f"{', '.join(map(str, ranks))}: {', '.join(names)}{more}. They act on activations that are split. Give their "
            'modules the style "replicated_with_grad_allreduce", which sums their gradients; if their inputs are equal on all ranks, '
            "something before them draws different random numbers on each rank, or the ranks of a group read different batches"
        )
    # Of all ranks, because one pipeline stage can be frozen entirely.
    return any(has_any for _, has_any in numbers_by_rank)


def _list_differing(grads: list[tuple[str, torch.Tensor]], axis: SplitAxis) -> list[str]:
    """Return the names of the gradients that differ between the ranks of the axis. All of them must call it.

    Args:
        grads: Pairs of (name of the parameter, gradient), in the same order on all ranks.
        axis: Mesh axis whose ranks compare their gradients.
    """
    digests = torch.stack([_make_gradient_digest(grad) for _, grad in grads])
    digests_by_rank = [torch.empty_like(digests) for _ in range(axis.size)]
    dist.all_gather(digests_by_rank, digests, group=axis.group)
    stacked = torch.stack(digests_by_rank)  # (ranks, gradients, 2): norm and projection
    differences = (stacked - stacked[0]).abs().amax(dim=(0, 2))
    norms = stacked[..., 0].abs().amax(0)
    is_differing = differences > _RELATIVE_TOLERANCE * norms + _TOLERANCE_OF_LARGEST * norms.max()
    return [name for (name, _), differs in zip(grads, is_differing.tolist()) if differs]


def _make_gradient_digest(grad: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the norm and one projection of a gradient, so that ranks can compare gradients cheaply.

    The gradient is processed in blocks, because a float64 copy of all of it would take many times its memory.
    """
    flat, wide_dtype = grad.reshape(-1), choose_norm_dtype(grad.device)
    sums = torch.zeros(2, device=flat.device, dtype=wide_dtype)
    for start in range(0, flat.numel(), _BLOCK_SIZE):
        block = flat[start : start + _BLOCK_SIZE].to(wide_dtype)
        # Fixed weights that differ for all elements, so that the projection depends on the order of the elements.
        weights = torch.arange(start, start + block.numel(), device=flat.device, dtype=wide_dtype).cos()
        sums += torch.stack([block @ block, block @ weights])
    return torch.stack([sums[0].sqrt(), sums[1]])
