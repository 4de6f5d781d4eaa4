"""Conversions between replicated and sharded activations ("crossings"): collectives, their gradients, and RNG states.

The backward of each conversion also consists of these conversions, so that it can be differentiated again (for a
gradient penalty). In this module, a `whole` tensor is equal on all ranks of the axis. A `part` is one rank's shard, and
a `term` is one rank's summand::

    function              forward                          backward
    copy_to_split_region  returns the whole unchanged      sum_terms
    sum_terms             all-reduce of terms              copy_to_split_region
    take_part             whole -> part                    join
    join                  all-gather of parts              take_part
    join_for_terms        all-gather of parts              reduce_scatter_terms
    reduce_scatter_terms  reduce-scatter of terms          join_for_terms

`join` is for computations that are identical on all ranks, so that each rank has the whole gradient. `join_for_terms` is
for computations that differ between ranks, so that the ranks' gradients must be added.

Ranks of one group have equal RNG states, so that dropout on replicated activations is equal on all of them. On sharded
activations, an equal state would give each rank's heads identical dropout masks. So a rank then uses a state that is
derived from the common state and its rank. The derived state does not have to be saved. Activation checkpointing and
resumed runs restore the common state, from which it is derived again.
"""

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from headway.core.runtime import seed
from headway.errors import DataError
from headway.layouts.tensor._torch import functional_collectives

RecordingContext = Callable[[], AbstractContextManager[None]]
"""Function that returns a context manager. A collective that runs in this context is recorded for reports of hangs."""
TensorFunction = Callable[[torch.Tensor], torch.Tensor]
"""Function that converts a tensor, such as from replicated to sharded or from sharded to replicated."""


@dataclass(frozen=True)
class SplitAxis:
    """Ranks of one mesh axis across which a model is split.

    Attributes:
        mesh: One-dimensional DeviceMesh.
        group: Process group of the ranks.
        rank: Rank of this process in the group.
        size: Number of ranks.
    """

    mesh: Any
    group: Any
    rank: int
    size: int

    @classmethod
    def from_mesh(cls, mesh: Any) -> "SplitAxis":
        """Return the `SplitAxis` of a one-dimensional DeviceMesh."""
        return cls(mesh, mesh.get_group(), mesh.get_local_rank(), mesh.size())


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, convert: TensorFunction, convert_gradient: TensorFunction
    ) -> torch.Tensor:
        ctx.convert_gradient = convert_gradient
        return convert(given)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.convert_gradient(grad), None, None


def apply_with_backward(given: torch.Tensor, convert: TensorFunction, convert_gradient: TensorFunction) -> torch.Tensor:
    """Return `convert(given)`, with `convert_gradient` as its backward.

    Autograd does not record the operations within `convert`.

    Args:
        given: Tensor to convert.
        convert: Function that converts the tensor in forward.
        convert_gradient: Function that converts the gradient in backward.
    """
    return _Crossing.apply(given, convert, convert_gradient)  # type: ignore[no-any-return, no-untyped-call]


def view_unchanged(given: torch.Tensor) -> torch.Tensor:
    """Return a view of the tensor. Conversions whose only effect is in backward use this function as their forward."""
    return given.view_as(given)


def copy_to_split_region(whole: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """Return a replicated tensor unchanged, for a computation that differs between ranks.

    Backward sums the tensor's gradients over the ranks.
    """
    return whole if axis.size == 1 else apply_with_backward(whole, view_unchanged, partial(sum_terms, axis=axis))


def sum_terms(term: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """Return the sum of the ranks' tensors on all ranks (all-reduce). Backward returns the sum's gradient unchanged."""
    return (
        term
        if axis.size == 1
        else apply_with_backward(term, partial(_sum_over_axis, axis=axis), partial(copy_to_split_region, axis=axis))
    )


def join(part: torch.Tensor, axis: SplitAxis, dim: int, size: int | None = None) -> torch.Tensor:
    """Return the full tensor, all-gathered from the ranks' shards, for computations that are identical on all ranks.

    Args:
        part: This rank's shard, as `torch.chunk` returns it.
        axis: Mesh axis whose ranks hold the shards.
        dim: Dimension along which the tensor is sharded.
        size: Full length along `dim`. None: all shards have equal length.
    """
    if axis.size == 1:
        return part
    return apply_with_backward(
        part, partial(_gather_parts, axis=axis, dim=dim, size=size), partial(take_part, axis=axis, dim=dim)
    )


def join_for_terms(part: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """All-gather a sharded tensor for a computation that differs between ranks. Backward reduce-scatters its gradients.

    Args:
        part: This rank's shard. All ranks' shards must have equal length.
        axis: Mesh axis whose ranks hold the shards.
        dim: Dimension along which the tensor is sharded.
    """
    if axis.size == 1:
        return part
    return apply_with_backward(
        part, partial(_gather_parts, axis=axis, dim=dim), partial(reduce_scatter_terms, axis=axis, dim=dim)
    )


def take_part(whole: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """Return this rank's shard of a replicated tensor. Backward all-gathers the shards' gradients."""
    if axis.size == 1:
        return whole
    return apply_with_backward(
        whole, partial(_own_part, axis=axis, dim=dim), partial(join, axis=axis, dim=dim, size=whole.shape[dim])
    )


def reduce_scatter_terms(term: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """Return this rank's shard of the sum of the ranks' tensors (reduce-scatter).

    Args:
        term: This rank's term of the sum.
        axis: Mesh axis whose ranks hold the shards.
        dim: Dimension to shard.

    Raises:
        DataError: If the length along `dim` is not a multiple of the number of ranks.
    """
    if axis.size == 1:
        return term
    check_divides(term, axis, dim)
    return apply_with_backward(
        term, partial(_sum_part, axis=axis, dim=dim), partial(join_for_terms, axis=axis, dim=dim)
    )


def check_divides(whole: torch.Tensor, axis: SplitAxis, dim: int) -> None:
    """Raise `DataError` if a sequence cannot be divided evenly among the ranks.

    Args:
        whole: Tensor with the full sequence.
        axis: Mesh axis whose ranks divide the sequence.
        dim: Sequence dimension of the tensor.

    Raises:
        DataError: If the sequence length is not a multiple of the number of ranks.
    """
    if whole.shape[dim] % axis.size:
        raise DataError(
            f"sequence_parallel=True splits sequences across {axis.size} ranks, but one has the length {whole.shape[dim]} (dimension "
            f"{dim} of {tuple(whole.shape)}); pad batches to a multiple of {axis.size}"
        )


def take_chunk(tensor: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """Return this rank's chunk of a tensor, as `torch.chunk` returns it.

    The chunk is empty if `torch.chunk` makes fewer chunks than there are ranks and has none for this rank.
    """
    length = tensor.shape[dim]
    step = -(-length // axis.size)
    start = min(step * axis.rank, length)
    return tensor.narrow(dim, start, min(step, length - start))


def take_packed_chunks(tensor: torch.Tensor, axis: SplitAxis, dim: int, factor: int) -> torch.Tensor:
    """Return a new tensor with this rank's chunk of each of several packed matrices.

    The chunks are concatenated along `dim`.

    Args:
        tensor: Matrices that are concatenated along `dim`.
        axis: Mesh axis whose ranks hold the chunks.
        dim: Dimension along which the matrices are packed and split.
        factor: Number of packed matrices.
    """
    parts = [take_chunk(part, axis, dim) for part in tensor.chunk(factor, dim)]
    return torch.cat(parts, dim) if factor > 1 else parts[0].clone(memory_format=torch.contiguous_format)


def all_gather(part: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """Return the ranks' shards, all-gathered along the first dimension. Not differentiable."""
    found = functional_collectives.all_gather_into_tensor(part.contiguous(), axis.size, axis.group.group_name)
    return functional_collectives.wait_tensor(found)  # type: ignore[no-any-return]


def reduce_scatter(terms: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """Return this rank's shard of the sum of the ranks' tensors, along the first dimension. Not differentiable."""
    found = functional_collectives.reduce_scatter_tensor(terms.contiguous(), "sum", axis.size, axis.group.group_name)
    return functional_collectives.wait_tensor(found)  # type: ignore[no-any-return]


def exchange_rows(
    rows: torch.Tensor,
    axis: SplitAxis,
    sent: list[int],
    received: list[int],
    grad_factor: float,
    noted: RecordingContext,
) -> torch.Tensor:
    """Send rows to other ranks, and return the rows received from them (all-to-all). Differentiable.

    Args:
        rows: Rows to send, ordered by destination rank.
        axis: Mesh axis whose ranks exchange rows.
        sent: Number of rows to send to each rank.
        received: Number of rows to receive from each rank.
        grad_factor: Factor by which gradients are multiplied before they are sent back.
        noted: Function that returns the context manager in which each all-to-all runs, in forward and in backward.
    """

    def send_rows(rows: torch.Tensor) -> torch.Tensor:
        with noted():
            return _all_to_all(rows, axis, sent, received)

    def return_gradients(grad: torch.Tensor) -> torch.Tensor:
        return exchange_rows(grad * grad_factor, axis, received, sent, 1.0, noted)

    return apply_with_backward(rows, send_rows, return_gradients)


def exchange_counts(counts: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """Send integers to other ranks, and return the integers received from them (all-to-all).

    Each rank sends the same number of integers to every rank.
    """
    even = [len(counts) // axis.size] * axis.size
    return _all_to_all(counts, axis, even, even)


def _all_to_all(rows: torch.Tensor, axis: SplitAxis, sent: list[int], received: list[int]) -> torch.Tensor:
    found = functional_collectives.all_to_all_single(rows.contiguous(), received, sent, axis.group.group_name)
    return functional_collectives.wait_tensor(found)  # type: ignore[no-any-return]


def _sum_over_axis(tensor: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    found = functional_collectives.all_reduce(tensor.contiguous(), "sum", axis.group.group_name)
    return functional_collectives.wait_tensor(found)  # type: ignore[no-any-return]


def _gather_parts(part: torch.Tensor, axis: SplitAxis, dim: int, size: int | None = None) -> torch.Tensor:
    dim = dim % part.dim()
    step = part.shape[dim] if size is None else -(-size // axis.size)
    if part.shape[dim] < step:
        padding = part.new_zeros(*part.shape[:dim], step - part.shape[dim], *part.shape[dim + 1 :])
        part = torch.cat([part, padding], dim)
    found = all_gather(part, axis)
    whole = found if dim == 0 else torch.cat(found.chunk(axis.size, 0), dim)
    return whole if size is None or whole.shape[dim] == size else whole.narrow(dim, 0, size)


def _own_part(whole: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    return take_chunk(whole, axis, dim).contiguous()


def _sum_part(term: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    dim = dim % term.dim()
    stacked = term if dim == 0 else torch.cat(term.chunk(axis.size, dim), 0)
    return reduce_scatter(stacked, axis)


class SplitRNG:
    """Pair of RNG states of one rank: one for replicated activations, and one for sharded activations of a model.

    Args:
        axis: Mesh axis across whose ranks the model is split.

    Attributes:
        part: Function that switches to this rank's RNG state, for sharded activations.
        join: Function that switches back to the common RNG state, for replicated activations.
    """

    def __init__(self, axis: SplitAxis) -> None:
        self._axis = axis
        self._common: torch.Tensor | None = None
        self._start: torch.Tensor | None = None
        self._kind: str = axis.mesh.device_type
        # Not as decorators, which would run at import time: `torch.compiler.disable` imports more than torch itself.
        self.part: Callable[[], None] = torch.compiler.disable(self._switch_to_own)  # type: ignore[no-untyped-call]
        self.join: Callable[[], None] = torch.compiler.disable(self._switch_to_common)  # type: ignore[no-untyped-call]

    def _switch_to_own(self) -> None:
        """Switch to this rank's RNG state, for sharded activations. Do nothing if this state is already in use."""
        if self._common is None:
            self._common = self._read_state()
            common = zlib.crc32(self._common.numpy().tobytes())
            self._start = torch.Generator(self._kind).manual_seed(common * 65_537 + self._axis.rank).get_state()
            self._write_state(self._start)

    def _switch_to_common(self) -> None:
        """Switch back to the common RNG state, for replicated activations.

        If numbers were drawn from this rank's state meanwhile, the common state advances by one draw.
        """
        if self._common is None:
            return
        assert self._start is not None
        is_drawn = not torch.equal(self._read_state(), self._start)
        self._write_state(self._common)
        self._common = None
        self._start = None
        if is_drawn:
            torch.rand((), device=self._kind)

    def _read_state(self) -> torch.Tensor:
        if self._kind == "cpu":
            return seed.read_torch_rng_state()
        state: torch.Tensor = torch.get_device_module(self._kind).get_rng_state()
        return state

    def _write_state(self, state: torch.Tensor) -> None:
        if self._kind == "cpu":
            seed.write_torch_rng_state(state)
        else:
            torch.get_device_module(self._kind).set_rng_state(state)
