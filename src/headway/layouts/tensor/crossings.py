"""Conversions between replicated and sharded activations ("crossings"): collectives, their gradients, and RNG states.

The backward of each conversion also consists of these conversions, so that it can be differentiated again (for a
gradient penalty). In this module, a `full` tensor is equal on all ranks of the axis. A `shard` is one rank's part of it.
A `term` is one rank's summand of a full tensor::

    function                  forward                      backward
    copy_to_split_region      returns the full tensor      sum_terms
    sum_terms                 all-reduce of terms          copy_to_split_region
    take_shard                full -> shard                gather_shards
    gather_shards             all-gather of shards         take_shard
    gather_for_split_region   all-gather of shards         reduce_scatter_terms
    reduce_scatter_terms      reduce-scatter of terms      gather_for_split_region

A split region is a computation that differs between the ranks, such as that of their attention heads. Gradients from it
are terms. So `copy_to_split_region` and `gather_for_split_region` add the ranks' gradients in backward.
`gather_shards` is for computations that are identical on all ranks, so that each rank already has the full gradient.

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
    """Autograd function whose forward and backward are given functions."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, convert: TensorFunction, convert_gradient: TensorFunction
    ) -> torch.Tensor:
        """Return `convert(tensor)`, and remember the function for the gradient."""
        ctx.convert_gradient = convert_gradient
        return convert(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Return the converted gradient of the tensor. The two functions get none."""
        return ctx.convert_gradient(grad), None, None


def apply_with_backward(
    tensor: torch.Tensor, convert: TensorFunction, convert_gradient: TensorFunction
) -> torch.Tensor:
    """Return `convert(tensor)`, with `convert_gradient` as its backward.

    Autograd does not record the operations within `convert`.

    Args:
        tensor: Tensor to convert.
        convert: Function that converts the tensor in forward.
        convert_gradient: Function that converts the gradient in backward.
    """
    return _Crossing.apply(tensor, convert, convert_gradient)  # type: ignore[no-any-return, no-untyped-call]


def view_unchanged(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the tensor. Conversions whose only effect is in backward use this function as their forward."""
    return tensor.view_as(tensor)


def copy_to_split_region(full: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """Return a replicated tensor unchanged, for a computation that differs between ranks.

    Backward sums the tensor's gradients over the ranks.
    """
    if axis.size == 1:
        return full
    return apply_with_backward(full, view_unchanged, partial(sum_terms, axis=axis))


def sum_terms(term: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """Return the sum of the ranks' tensors on all ranks (all-reduce). Backward returns the sum's gradient unchanged."""
    if axis.size == 1:
        return term
    return apply_with_backward(term, partial(_sum_over_axis, axis=axis), partial(copy_to_split_region, axis=axis))


def gather_shards(shard: torch.Tensor, axis: SplitAxis, dim: int, size: int | None = None) -> torch.Tensor:
    """Return the full tensor, all-gathered from the ranks' shards, for computations that are identical on all ranks.

    Backward returns this rank's shard of the gradient, without a collective.

    Args:
        shard: This rank's shard, as `torch.chunk` returns it.
        axis: Mesh axis whose ranks hold the shards.
        dim: Dimension along which the tensor is sharded.
        size: Full length along `dim`. None: all shards have equal length.
    """
    if axis.size == 1:
        return shard
    return apply_with_backward(
        shard, partial(_all_gather, axis=axis, dim=dim, size=size), partial(take_shard, axis=axis, dim=dim)
    )


def gather_for_split_region(shard: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """All-gather a sharded tensor for a computation that differs between ranks. Backward reduce-scatters its gradients.

    Args:
        shard: This rank's shard. All ranks' shards must have equal length.
        axis: Mesh axis whose ranks hold the shards.
        dim: Dimension along which the tensor is sharded.
    """
    if axis.size == 1:
        return shard
    return apply_with_backward(
        shard, partial(_all_gather, axis=axis, dim=dim), partial(reduce_scatter_terms, axis=axis, dim=dim)
    )


def take_shard(full: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """Return this rank's shard of a replicated tensor. Backward all-gathers the shards' gradients."""
    if axis.size == 1:
        return full
    return apply_with_backward(
        full,
        partial(_slice_shard, axis=axis, dim=dim),
        partial(gather_shards, axis=axis, dim=dim, size=full.shape[dim]),
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
        term, partial(_reduce_scatter, axis=axis, dim=dim), partial(gather_for_split_region, axis=axis, dim=dim)
    )


def check_divides(full: torch.Tensor, axis: SplitAxis, dim: int) -> None:
    """Raise `DataError` if a sequence cannot be divided evenly among the ranks.

    Args:
        full: Tensor with the full sequence.
        axis: Mesh axis whose ranks divide the sequence.
        dim: Sequence dimension of the tensor.

    Raises:
        DataError: If the sequence length is not a multiple of the number of ranks.
    """
    if full.shape[dim] % axis.size:
        raise DataError(
            f"sequence_parallel=True splits sequences across {axis.size} ranks, but one has the length {full.shape[dim]} (dimension "
            f"{dim} of {tuple(full.shape)}); pad batches to a multiple of {axis.size}"
        )


def take_chunk(tensor: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """Return this rank's chunk of a tensor, as `torch.chunk` returns it.

    The chunk is empty if `torch.chunk` makes fewer chunks than there are ranks and has none for this rank.
    """
    length = tensor.shape[dim]
    chunk_length = -(-length // axis.size)
    start = min(chunk_length * axis.rank, length)
    return tensor.narrow(dim, start, min(chunk_length, length - start))


def take_packed_chunks(tensor: torch.Tensor, axis: SplitAxis, dim: int, factor: int) -> torch.Tensor:
    """Return a new tensor with this rank's chunk of each of several packed matrices.

    The chunks are concatenated along `dim`.

    Args:
        tensor: Matrices that are concatenated along `dim`.
        axis: Mesh axis whose ranks hold the chunks.
        dim: Dimension along which the matrices are packed and split.
        factor: Number of packed matrices.
    """
    chunks = [take_chunk(matrix, axis, dim) for matrix in tensor.chunk(factor, dim)]
    return torch.cat(chunks, dim) if factor > 1 else chunks[0].clone(memory_format=torch.contiguous_format)


def all_gather(shard: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """Return the ranks' shards, all-gathered along the first dimension. Not differentiable."""
    gathered = functional_collectives.all_gather_into_tensor(shard.contiguous(), axis.size, axis.group.group_name)
    return functional_collectives.wait_tensor(gathered)  # type: ignore[no-any-return]


def reduce_scatter(terms: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """Return this rank's shard of the sum of the ranks' tensors, along the first dimension. Not differentiable."""
    shard = functional_collectives.reduce_scatter_tensor(terms.contiguous(), "sum", axis.size, axis.group.group_name)
    return functional_collectives.wait_tensor(shard)  # type: ignore[no-any-return]


def exchange_rows(
    rows: torch.Tensor,
    axis: SplitAxis,
    num_sent: list[int],
    num_received: list[int],
    grad_factor: float,
    record_exchange: RecordingContext,
) -> torch.Tensor:
    """Send rows to other ranks, and return the rows received from them (all-to-all). Differentiable.

    Args:
        rows: Rows to send, ordered by destination rank.
        axis: Mesh axis whose ranks exchange rows.
        num_sent: Number of rows to send to each rank, by rank in the group.
        num_received: Number of rows to receive from each rank, by rank in the group.
        grad_factor: Factor by which gradients are multiplied before they are sent back.
        record_exchange: Function that returns the context manager in which each all-to-all runs, in forward and in
            backward.
    """

    def send_rows(rows: torch.Tensor) -> torch.Tensor:
        with record_exchange():
            return _all_to_all(rows, axis, num_sent, num_received)

    def return_gradients(grad: torch.Tensor) -> torch.Tensor:
        return exchange_rows(grad * grad_factor, axis, num_received, num_sent, 1.0, record_exchange)

    return apply_with_backward(rows, send_rows, return_gradients)


def exchange_counts(counts: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """Send integers to other ranks, and return the integers received from them (all-to-all).

    Each rank sends the same number of integers to every rank.
    """
    even = [len(counts) // axis.size] * axis.size
    return _all_to_all(counts, axis, even, even)


def _all_to_all(rows: torch.Tensor, axis: SplitAxis, num_sent: list[int], num_received: list[int]) -> torch.Tensor:
    """Exchange rows without autograd. The arguments are those of `exchange_rows`."""
    received = functional_collectives.all_to_all_single(
        rows.contiguous(), num_received, num_sent, axis.group.group_name
    )
    return functional_collectives.wait_tensor(received)  # type: ignore[no-any-return]


def _sum_over_axis(tensor: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """Return the sum of a tensor over the ranks of the axis, without autograd."""
    total = functional_collectives.all_reduce(tensor.contiguous(), "sum", axis.group.group_name)
    return functional_collectives.wait_tensor(total)  # type: ignore[no-any-return]


def _all_gather(shard: torch.Tensor, axis: SplitAxis, dim: int, size: int | None = None) -> torch.Tensor:
    """All-gather shards along a dimension, without autograd. The arguments are those of `gather_shards`.

    A shard that is shorter than the others, as `torch.chunk` makes the last ones, is padded for the collective.
    """
    dim = dim % shard.dim()
    padded_length = shard.shape[dim] if size is None else -(-size // axis.size)
    if shard.shape[dim] < padded_length:
        num_missing = padded_length - shard.shape[dim]
        padding = shard.new_zeros(*shard.shape[:dim], num_missing, *shard.shape[dim + 1 :])
        shard = torch.cat([shard, padding], dim)
    gathered = all_gather(shard, axis)  # along the first dimension
    full = gathered if dim == 0 else torch.cat(gathered.chunk(axis.size, 0), dim)
    return full if size is None or full.shape[dim] == size else full.narrow(dim, 0, size)


def _slice_shard(full: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """Return a contiguous copy of this rank's shard of a full tensor along dimension `dim`."""
    return take_chunk(full, axis, dim).contiguous()


def _reduce_scatter(term: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """Reduce-scatter terms along a dimension, without autograd."""
    dim = dim % term.dim()
    # The collective scatters along the first dimension.
    stacked = term if dim == 0 else torch.cat(term.chunk(axis.size, dim), 0)
    return reduce_scatter(stacked, axis)


class SplitRNG:
    """Pair of RNG states of one rank: one for replicated activations, and one for sharded activations of a model.

    Args:
        axis: Mesh axis across whose ranks the model is split.

    Attributes:
        use_rank_state: Function that switches to this rank's RNG state, for sharded activations. It does nothing if
            this state is already in use.
        use_common_state: Function that switches back to the common RNG state, for replicated activations.
    """

    def __init__(self, axis: SplitAxis) -> None:
        self._axis = axis
        # Saved common state, and this rank's state right after it was seeded. Both None while the common state is in use.
        self._common_state: torch.Tensor | None = None
        self._seeded_state: torch.Tensor | None = None
        self._device_type: str = axis.mesh.device_type
        # Not as decorators, which would run at import time: `torch.compiler.disable` imports more than torch itself.
        self.use_rank_state: Callable[[], None] = torch.compiler.disable(self._switch_to_rank_state)  # type: ignore[no-untyped-call]
        self.use_common_state: Callable[[], None] = torch.compiler.disable(self._switch_to_common_state)  # type: ignore[no-untyped-call]

    def _switch_to_rank_state(self) -> None:
        """Switch to this rank's RNG state, for sharded activations. Do nothing if this state is already in use."""
        if self._common_state is None:
            self._common_state = self._read_state()
            common_seed = zlib.crc32(self._common_state.numpy().tobytes())
            rank_seed = common_seed * 65_537 + self._axis.rank  # different for all ranks of up to 65,537
            self._seeded_state = torch.Generator(self._device_type).manual_seed(rank_seed).get_state()
            self._write_state(self._seeded_state)

    def _switch_to_common_state(self) -> None:
        """Switch back to the common RNG state, for replicated activations.

        If numbers were drawn from this rank's state meanwhile, the common state advances by one draw. So the next
        sharded activations get different numbers. Do nothing if the common state is already in use.
        """
        if self._common_state is None:
            return
        assert self._seeded_state is not None
        was_used = not torch.equal(self._read_state(), self._seeded_state)
        self._write_state(self._common_state)
        self._common_state = None
        self._seeded_state = None
        if was_used:
            torch.rand((), device=self._device_type)

    def _read_state(self) -> torch.Tensor:
        """Return the current state of torch's RNG for the device."""
        if self._device_type == "cpu":
            return seed.read_torch_rng_state()
        state: torch.Tensor = torch.get_device_module(self._device_type).get_rng_state()
        return state

    def _write_state(self, state: torch.Tensor) -> None:
        """Set the state of torch's RNG for the device."""
        if self._device_type == "cpu":
            seed.write_torch_rng_state(state)
        else:
            torch.get_device_module(self._device_type).set_rng_state(state)
