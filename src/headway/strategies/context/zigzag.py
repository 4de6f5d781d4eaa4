"""How sequences are divided among the ranks of context parallelism, and how their parts travel.

A sequence is padded to a multiple of twice the number of ranks and divided into that many pieces. Rank r holds piece r and the
piece that lies as far from the end: under causal attention a late piece sees much and an early one little, and so all ranks
compute the same amount. It is torch's head-tail order, which its ring attention expects.
"""

from typing import Any

import torch
from torch.nn.functional import pad

from headway.strategies.tensor.crossings import SplitAxis, all_gather, reduce_scatter


def padded(length: int, axis: SplitAxis) -> int:
    """The next length that can be divided."""
    step = 2 * axis.size
    return -(-length // step) * step


def pieces_of(rank: int, axis: SplitAxis) -> tuple[int, int]:
    """The numbers of the two pieces that a rank holds."""
    return rank, 2 * axis.size - 1 - rank


def part_of(whole: torch.Tensor, axis: SplitAxis, dim: int, filler: float = 0) -> torch.Tensor:
    """This rank's part of a whole tensor; the gradients that come back through it are terms of a sum over the ranks.

    Args:
        whole: alike on all ranks.
        axis: the ranks.
        dim: the sequence.
        filler: what it is padded with.
    """
    dim = dim % whole.dim()
    length = padded(whole.shape[dim], axis)
    if length > whole.shape[dim]:
        whole = pad(whole, [0, 0] * (whole.dim() - 1 - dim) + [0, length - whole.shape[dim]], value=filler)
    step = length // (2 * axis.size)
    return torch.cat([whole.narrow(dim, piece * step, step) for piece in pieces_of(axis.rank, axis)], dim)


def gather(part: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """The whole of the ranks' parts, padding included, for computations in which each rank does its share."""
    return _Gather.apply(part, axis, dim % part.dim(), 0)  # type: ignore[no-any-return, no-untyped-call]


def scatter(terms: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """This rank's part of the sum of the ranks' terms; autograd does not see it."""
    stacked = _by_rank(terms, axis, dim % terms.dim())
    return reduce_scatter(stacked.view(-1, *stacked.shape[2:]), axis)


def join(part: torch.Tensor, axis: SplitAxis, dim: int, length: int, times: int = 1) -> torch.Tensor:
    """The whole of the ranks' parts, of this length without padding, for computations that all ranks do alike.

    Args:
        part: this rank's.
        axis: the ranks.
        dim: the sequence.
        length: of the whole.
        times: what gradients that come back are multiplied by.
    """
    whole: torch.Tensor = _Gather.apply(part, axis, dim % part.dim(), times)  # type: ignore[no-untyped-call]
    return whole if whole.shape[dim] == length else whole.narrow(dim, 0, length).clone()


def one_of(whole: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """What all ranks compute alike, as one term of a sum over them: its gradient is divided among them."""
    return _OneOf.apply(whole, axis) if whole.requires_grad else whole  # type: ignore[no-untyped-call]


def _in_order(by_rank: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """Parts, stacked by rank along a new first dimension, as one sequence."""
    step = by_rank.shape[dim + 1] // 2
    found: list[Any] = [None] * (2 * axis.size)
    for rank in range(axis.size):
        for place, piece in enumerate(pieces_of(rank, axis)):
            found[piece] = by_rank[rank].narrow(dim, place * step, step)
    return torch.cat(found, dim)


def _by_rank(whole: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """A sequence as its parts, stacked by rank along a new first dimension."""
    pieces = whole.chunk(2 * axis.size, dim)
    return torch.stack([torch.cat([pieces[p] for p in pieces_of(rank, axis)], dim) for rank in range(axis.size)])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, axis: SplitAxis, dim: int, times: int) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.times = axis, dim, times
        return _in_order(all_gather(part, axis).view(axis.size, *part.shape), axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        axis, dim = ctx.axis, ctx.dim
        if ctx.times:  # every rank has all of it
            mine = part_of(grad, axis, dim)
            return mine if ctx.times == 1 else mine * ctx.times, None, None, None
        return scatter(grad, axis, dim), None, None, None


class _OneOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
        ctx.size = axis.size
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad / ctx.size, None
