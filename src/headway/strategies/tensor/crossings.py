"""Where activations change from whole to split and back: each collective together with that of its gradient, and random numbers.

Backwards are made of the same crossings, so that they can be differentiated again (a gradient penalty).

`whole` is what all ranks of the axis hold alike, `part` a rank's own slice, `term` one summand of it on each rank.

Ranks of one group hold the same state of random numbers, so that dropout on whole activations is alike on all of them. On
activations that are cut, the same state would give each rank's heads the same mask. There a rank goes on with a stream
that follows from the common state and its number. It needs no memory: whoever computes again from the same common state
(activation checkpointing, a resumed run) draws the same numbers.
"""

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from headway.errors import DataError
from headway.runtime import seed

Noted = Callable[[], AbstractContextManager[None]]
"""Makes the block that tells others of an exchange while it waits."""
Way = Callable[[torch.Tensor], torch.Tensor]
"""From a tensor on one side of a crossing to that on the other."""
_COLLECTIVES = torch.ops._c10d_functional


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


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, there: Way, back: Way) -> torch.Tensor:
        ctx.back = back
        return there(given)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.back(grad), None, None


def cross(given: torch.Tensor, there: Way, back: Way) -> torch.Tensor:
    """`there(given)`, with the gradient `back(grad)`; autograd does not look into `there`."""
    return _Crossing.apply(given, there, back)  # type: ignore[no-any-return, no-untyped-call]


def same(given: torch.Tensor) -> torch.Tensor:
    """The way on which nothing changes."""
    return given.view_as(given)


def spread(whole: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """Whole on, for computations that are cut: gradients that come back are terms."""
    return whole if axis.size == 1 else cross(whole, same, partial(total, axis=axis))


def total(term: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """The sum of the ranks' terms, whole."""
    return term if axis.size == 1 else cross(term, partial(_sum, axis=axis), partial(spread, axis=axis))


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
    return cross(part, partial(_gather, axis=axis, dim=dim, size=size), partial(part_of, axis=axis, dim=dim))


def join_for_terms(part: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """The whole of the ranks' parts, for computations that are cut: gradients that come back are terms."""
    if axis.size == 1:
        return part
    return cross(part, partial(_gather, axis=axis, dim=dim), partial(part_of_total, axis=axis, dim=dim))


def part_of(whole: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """This rank's part of what all hold alike."""
    if axis.size == 1:
        return whole
    return cross(
        whole, partial(_own_part, axis=axis, dim=dim), partial(join, axis=axis, dim=dim, size=whole.shape[dim])
    )


def part_of_total(term: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """This rank's part of the sum of the ranks' terms."""
    if axis.size == 1:
        return term
    check_divides(term, axis, dim)
    return cross(term, partial(_sum_part, axis=axis, dim=dim), partial(join_for_terms, axis=axis, dim=dim))


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
    found = _COLLECTIVES.all_gather_into_tensor(part.contiguous(), axis.size, axis.group.group_name)
    return _COLLECTIVES.wait_tensor(found)  # type: ignore[no-any-return]


def reduce_scatter(terms: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """This rank's part, along the first dimension, of the sum of the ranks' terms; autograd does not see it."""
    found = _COLLECTIVES.reduce_scatter_tensor(terms.contiguous(), "sum", axis.size, axis.group.group_name)
    return _COLLECTIVES.wait_tensor(found)  # type: ignore[no-any-return]


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

    def there(rows: torch.Tensor) -> torch.Tensor:
        with noted():
            return _all_to_all(rows, axis, sent, received)

    def back(grad: torch.Tensor) -> torch.Tensor:
        return exchange(grad * grad_factor, axis, received, sent, 1.0, noted)

    return cross(rows, there, back)


def exchange_counts(counts: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """As many numbers to each rank as from each."""
    even = [len(counts) // axis.size] * axis.size
    return _all_to_all(counts, axis, even, even)


def _all_to_all(rows: torch.Tensor, axis: SplitAxis, sent: list[int], received: list[int]) -> torch.Tensor:
    found = _COLLECTIVES.all_to_all_single(rows.contiguous(), received, sent, axis.group.group_name)
    return _COLLECTIVES.wait_tensor(found)  # type: ignore[no-any-return]


def _sum(tensor: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    return _COLLECTIVES.wait_tensor(_COLLECTIVES.all_reduce(tensor.contiguous(), "sum", axis.group.group_name))  # type: ignore[no-any-return]


def _gather(part: torch.Tensor, axis: SplitAxis, dim: int, size: int | None = None) -> torch.Tensor:
    dim = dim % part.dim()
    step = part.shape[dim] if size is None else -(-size // axis.size)
    if part.shape[dim] < step:
        padding = part.new_zeros(*part.shape[:dim], step - part.shape[dim], *part.shape[dim + 1 :])
        part = torch.cat([part, padding], dim)
    found = all_gather(part, axis)
    whole = found if dim == 0 else torch.cat(found.chunk(axis.size, 0), dim)
    return whole if size is None or whole.shape[dim] == size else whole.narrow(dim, 0, size)


def _own_part(whole: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    return cut(whole, axis, dim).contiguous()


def _sum_part(term: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    dim = dim % term.dim()
    stacked = term if dim == 0 else torch.cat(term.chunk(axis.size, dim), 0)
    return reduce_scatter(stacked, axis)


class SplitRNG:
    """Of one model on one rank.

    Args:
        axis: the ranks among which it is cut.

    Attributes:
        part: from here on activations are cut.
        join: from here on they are whole again.
    """

    def __init__(self, axis: SplitAxis) -> None:
        self._axis = axis
        self._common: torch.Tensor | None = None
        self._start: torch.Tensor | None = None
        self._kind: str = axis.mesh.device_type
        # Not by decorators: what they import takes longer than torch.
        self.part: Callable[[], None] = torch.compiler.disable(self._part)  # type: ignore[no-untyped-call]
        self.join: Callable[[], None] = torch.compiler.disable(self._join)  # type: ignore[no-untyped-call]

    def _part(self) -> None:
        """From here on activations are cut."""
        if self._common is None:
            self._common = self._read()
            common = zlib.crc32(self._common.numpy().tobytes())
            self._start = torch.Generator(self._kind).manual_seed(common * 65_537 + self._axis.rank).get_state()
            self._write(self._start)

    def _join(self) -> None:
        """From here on they are whole; the common generator goes on where it was, one number further if any was drawn."""
        if self._common is None:
            return
        assert self._start is not None
        is_drawn = not torch.equal(self._read(), self._start)
        self._write(self._common)
        self._common = self._start = None
        if is_drawn:
            torch.rand((), device=self._kind)

    def _read(self) -> torch.Tensor:
        if self._kind == "cpu":
            return seed.read_torch()
        state: torch.Tensor = torch.get_device_module(self._kind).get_rng_state()
        return state

    def _write(self, state: torch.Tensor) -> None:
        if self._kind == "cpu":
            seed.write_torch(state)
        else:
            torch.get_device_module(self._kind).set_rng_state(state)
