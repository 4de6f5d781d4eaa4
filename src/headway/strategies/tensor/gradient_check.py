"""Gradients of whole parameters must be the same on all ranks of tensor parallelism: checked once, at the first update.

A parameter that the plan leaves whole, but that acts on cut activations (a scale within an attention, a trained activation
function between two matrices), gets another gradient on each rank. The ranks would drift apart, and nothing would fail.
"""

import torch
import torch.distributed as dist

from headway.errors import PrepareError
from headway.runtime.collectives.checked import Collectives
from headway.strategies.fully_sharded import gradients
from headway.strategies.tensor.crossings import SplitAxis
from headway.weights.pieces import is_dtensor

_RELATIVE = 1e-3
_NUM_NAMES = 4
_OF_LARGEST = 1e-6
"""Kernels that add in any order make small differences: of this gradient's norm, and of the largest one's."""
_BLOCK = 2**22
"""Elements that are looked at at once."""


def check(model: torch.nn.Module, axis: SplitAxis, everyone: Collectives) -> bool:
    """Compare the gradients that there are; returns whether there were any.

    Args:
        model: cut along the axis.
        axis: the ranks that must agree.
        everyone: all ranks, which hear of it: those of other groups would wait for these in the next exchange.

    Raises:
        PrepareError: ranks of some group differ, on all ranks.
    """
    named = [
        (name, gradients.local(parameter.grad).detach())
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
        and is_dtensor(parameter)  # not one that was added after prepare()
        and parameter.placements[-1].is_replicate()
    ]
    odd = _differing(named, axis) if named else []
    counts = [int(row[0]) for row in everyone.gather_numbers([float(len(odd))])]
    if any(counts):
        _raise(everyone.gather_objects(odd[:_NUM_NAMES]), counts)
    return bool(named) or any(parameter.grad is not None for parameter in model.parameters())


def _differing(named: list[tuple[str, torch.Tensor]], axis: SplitAxis) -> list[str]:
    rows = torch.stack([_digest(grad) for _, grad in named])
    found = [torch.empty_like(rows) for _ in range(axis.size)]
    dist.all_gather(found, rows, group=axis.group)
    every = torch.stack(found)
    spread = (every - every[0]).abs().amax(dim=(0, 2))
    norms = every[..., 0].abs().amax(0)
    odd = spread > _RELATIVE * norms + _OF_LARGEST * norms.max()
    return [name for (name, _), is_odd in zip(named, odd.tolist()) if is_odd]


def _raise(names: list[list[str]], counts: list[int]) -> None:
    ranks = [rank for rank, count in enumerate(counts) if count]
    first = ranks[0]
    more = " and others" if counts[first] > len(names[first]) else ""
    raise PrepareError(
        f"the gradients of {counts[first]} parameters that the tensor-parallel plan leaves whole differ between ranks "
        f"{', '.join(map(str, ranks))}: {', '.join(names[first])}{more}. They act on activations that are split. Give their modules "
        'the style "replicated_with_grad_allreduce", which sums their gradients; if their inputs are whole, something before them '
        "draws different random numbers on each rank, or the ranks of a group read different batches"
    )


def _digest(grad: torch.Tensor) -> torch.Tensor:
    """Its norm and one projection, in blocks: whole and in float64, an embedding's would take many times the gradient's memory."""
    flat, wide = grad.reshape(-1), torch.float32 if grad.device.type == "mps" else torch.float64
    sums = torch.zeros(2, device=flat.device, dtype=wide)
    for start in range(0, flat.numel(), _BLOCK):
        part = flat[start : start + _BLOCK].to(wide)
        waves = torch.arange(start, start + part.numel(), device=flat.device, dtype=wide).cos()
        sums += torch.stack([part @ part, part @ waves])
    return torch.stack([sums[0].sqrt(), sums[1]])
