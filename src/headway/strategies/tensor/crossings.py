"""Where activations change from whole to split and back: each collective together with that of its gradient.

Backwards are made of the same crossings, so that they can be differentiated again (a gradient penalty).

`whole` is what all ranks of the axis hold alike, `part` a rank's own slice, `term` one summand of it on each rank.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from headway.errors import DataError

Noted = Callable[[], AbstractContextManager[None]]
"""Makes the block that tells others of an exchange while it waits."""


@dataclass(frozen=True)
class SplitAxis:
    """The ranks among which a model is cut.

    Attributes:
        mesh: of one dimension.
        group: their process group.
        rank: this one's number among them.
        size: how many they are.
    """

    mesh: Any
    group: Any
    rank: int
    size: int

    @classmethod
    def of(cls, mesh: Any) -> "SplitAxis":
        """The one axis of this DeviceMesh."""
        return cls(mesh, mesh.get_group(), mesh.get_local_rank(), mesh.size())


def spread(whole: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """Whole on, for computations that are cut: gradients that come back are terms."""
    return whole if axis.size == 1 else _Spread.apply(whole, axis)  # type: ignore[no-untyped-call]


def total(term: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """The sum of the ranks' terms, whole."""
    return term if axis.size == 1 else _Total.apply(term, axis)  # type: ignore[no-untyped-call]


def join(part: torch.Tensor, axis: SplitAxis, dim: int, size: int | None = None) -> torch.Tensor:
    """The whole of the ranks' parts, for computations that all ranks do alike.

    Args:
        part: as `torch.chunk` cuts.
        axis: the ranks.
        dim: along which.
        size: of the whole; None: all parts are alike.
    """
    if axis.size == 1:
        return part
    return _Join.apply(part, axis, dim, size, False)  # type: ignore[no-any-return, no-untyped-call]


def join_for_terms(part: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """The whole of the ranks' parts, for computations that are cut: gradients that come back are terms."""
    return part if axis.size == 1 else _Join.apply(part, axis, dim, None, True)  # type: ignore[no-untyped-call]


def part_of(whole: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """This rank's part of what all hold alike."""
    return whole if axis.size == 1 else _Part.apply(whole, axis, dim)  # type: ignore[no-untyped-call]


def part_of_total(term: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """This rank's part of the sum of the ranks' terms."""
    if axis.size == 1:
        return term
    check_divides(term, axis, dim)
    return _PartOfTotal.apply(term, axis, dim)  # type: ignore[no-any-return, no-untyped-call]


def check_divides(whole: torch.Tensor, axis: SplitAxis, dim: int) -> None:
    """Raise where a sequence cannot be cut.

    Raises:
        DataError: its length is no multiple of the number of ranks.
    """
    if whole.shape[dim] % axis.size:
        raise DataError(
            f"sequence_parallel=True splits sequences across {axis.size} ranks, but one has the length {whole.shape[dim]} (dimension "
            f"{dim} of {tuple(whole.shape)}); pad batches to a multiple of {axis.size}"
        )


def cut(tensor: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """This rank's chunk, as `torch.chunk` cuts; empty where there are fewer."""
    length = tensor.shape[dim]
    step = -(-length // axis.size)
    start = min(step * axis.rank, length)
    return tensor.narrow(dim, start, min(step, length - start))


def cut_packed(tensor: torch.Tensor, axis: SplitAxis, dim: int, factor: int) -> torch.Tensor:
    """This rank's chunk of each of so many matrices that lie packed along a dimension, joined; memory of its own."""
    parts = [cut(part, axis, dim) for part in tensor.chunk(factor, dim)]
    return torch.cat(parts, dim) if factor > 1 else parts[0].clone(memory_format=torch.contiguous_format)


def all_gather(part: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """The ranks' parts, one after the other along the first dimension; autograd does not see it."""
    collectives = torch.ops._c10d_functional
    found = collectives.all_gather_into_tensor(part.contiguous(), axis.size, axis.group.group_name)
    return collectives.wait_tensor(found)  # type: ignore[no-any-return]


def reduce_scatter(terms: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """This rank's part, along the first dimension, of the sum of the ranks' terms; autograd does not see it."""
    collectives = torch.ops._c10d_functional
    found = collectives.reduce_scatter_tensor(terms.contiguous(), "sum", axis.size, axis.group.group_name)
    return collectives.wait_tensor(found)  # type: ignore[no-any-return]


def exchange(
    rows: torch.Tensor, axis: SplitAxis, sent: list[int], received: list[int], grad_factor: float, noted: Noted
) -> torch.Tensor:
    """Rows to the ranks that they are for: so many of them, one after the other, to each rank, and so many from each.

    Args:
        rows: those for rank 0 first.
        axis: the ranks.
        sent, received: how many, by rank.
        grad_factor: what gradients are multiplied by on their way back.
        noted: a block in which it happens, here and in backward.
    """
    return _Exchange.apply(rows, axis, sent, received, grad_factor, noted)  # type: ignore[no-any-return, no-untyped-call]


def exchange_counts(counts: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """As many numbers to each rank as from each."""
    even = [len(counts) // axis.size] * axis.size
    return _all_to_all(counts, axis, even, even)


def _all_to_all(rows: torch.Tensor, axis: SplitAxis, sent: list[int], received: list[int]) -> torch.Tensor:
    collectives = torch.ops._c10d_functional
    found = collectives.all_to_all_single(rows.contiguous(), received, sent, axis.group.group_name)
    return collectives.wait_tensor(found)  # type: ignore[no-any-return]


def _sum(tensor: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    collectives = torch.ops._c10d_functional
    return collectives.wait_tensor(collectives.all_reduce(tensor.contiguous(), "sum", axis.group.group_name))  # type: ignore[no-any-return]


def _gather(part: torch.Tensor, axis: SplitAxis, dim: int, size: int | None) -> torch.Tensor:
    dim = dim % part.dim()
    step = part.shape[dim] if size is None else -(-size // axis.size)
    if part.shape[dim] < step:
        padding = part.new_zeros(*part.shape[:dim], step - part.shape[dim], *part.shape[dim + 1 :])
        part = torch.cat([part, padding], dim)
    found = all_gather(part, axis)
    whole = found if dim == 0 else torch.cat(found.chunk(axis.size, 0), dim)
    return whole if size is None or whole.shape[dim] == size else whole.narrow(dim, 0, size)


def _sum_part(term: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    dim = dim % term.dim()
    stacked = term if dim == 0 else torch.cat(term.chunk(axis.size, dim), 0)
    return reduce_scatter(stacked, axis)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
        ctx.axis = axis
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return total(grad, ctx.axis), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, term: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
        ctx.axis = axis
        return _sum(term, axis)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return spread(grad, ctx.axis), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: torch.Tensor, axis: SplitAxis, dim: int, size: int | None, is_for_terms: bool
    ) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.is_for_terms = axis, dim, is_for_terms
        return _gather(part, axis, dim, size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        back = part_of_total if ctx.is_for_terms else part_of
        return back(grad, ctx.axis, ctx.dim), None, None, None, None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.size = axis, dim, whole.shape[dim]
        return cut(whole, axis, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return join(grad, ctx.axis, ctx.dim, ctx.size), None, None


class _PartOfTotal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, term: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _sum_part(term, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return join_for_terms(grad, ctx.axis, ctx.dim), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        axis: SplitAxis,
        sent: list[int],
        received: list[int],
        grad_factor: float,
        noted: Noted,
    ) -> torch.Tensor:
        ctx.axis, ctx.sent, ctx.received, ctx.grad_factor, ctx.noted = axis, sent, received, grad_factor, noted
        with noted():
            return _all_to_all(rows, axis, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        back = exchange(grad * ctx.grad_factor, ctx.axis, ctx.received, ctx.sent, 1.0, ctx.noted)
        return back, None, None, None, None, None
