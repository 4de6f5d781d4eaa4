"""Sharding of sequences for context parallelism: each rank's shard, and the collectives that join shards.

A sequence is padded, and divided into twice as many equal chunks as there are ranks. Rank r holds chunk r and the chunk
at the same distance from the end. Under causal attention a late chunk attends to many keys and an early one to few, so
all ranks have equal work. This is torch's head-tail order, which torch's ring attention expects.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from headway.layouts.tensor.crossings import (
    SplitAxis,
    all_gather,
    apply_with_backward,
    exchange_rows,
    reduce_scatter,
    view_unchanged,
)


def pad_length(length: int, axis: SplitAxis) -> int:
    """Return the length of a sequence after padding to the next multiple of twice the number of ranks.

    Args:
        length: Length of the sequence in tokens.
        axis: Mesh axis of context parallelism.
    """
    num_pieces = 2 * axis.size
    return -(-length // num_pieces) * num_pieces


def find_chunks(rank: int, axis: SplitAxis) -> tuple[int, int]:
    """Return the indices of the two chunks of a sequence that a rank computes: one from each end.

    A sequence is divided into twice as many equal chunks as there are ranks.

    Args:
        rank: Rank on the axis.
        axis: Mesh axis of context parallelism.
    """
    return rank, 2 * axis.size - 1 - rank


def split_sequence(full: torch.Tensor, axis: SplitAxis, dim: int, filler: float = 0) -> torch.Tensor:
    """Return this rank's shard of a replicated tensor, without communication. The sequence is padded if necessary.

    Backward gives `full` a gradient that is zero outside the shard. The sum of these gradients over the ranks is the
    full gradient.

    Args:
        full: Tensor that is equal on all ranks.
        axis: Mesh axis of context parallelism.
        dim: Dimension of the sequence.
        filler: Value used as padding. Default: 0.
    """
    dim = dim % full.dim()
    length = pad_length(full.shape[dim], axis)
    num_missing = length - full.shape[dim]
    if num_missing:
        # `pad` gets (before, after) for each dimension, beginning with the last one.
        full = functional.pad(full, [0, 0] * (full.dim() - 1 - dim) + [0, num_missing], value=filler)
    chunk_length = length // (2 * axis.size)
    chunks = [full.narrow(dim, chunk * chunk_length, chunk_length) for chunk in find_chunks(axis.rank, axis)]
    return torch.cat(chunks, dim)


def gather_sequence(shard: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """Return the full sequence with padding, all-gathered from the ranks' shards. Backward reduce-scatters gradients.

    Args:
        shard: This rank's shard.
        axis: Mesh axis of context parallelism.
        dim: Dimension of the sequence.
    """
    dim = dim % shard.dim()
    return apply_with_backward(
        shard, partial(_gather_sequence, axis=axis, dim=dim), partial(reduce_scatter_sequence, axis=axis, dim=dim)
    )


def exchange_for_heads(shard: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """Return full sequences of this rank's heads, given this rank's sequence shard of all heads (all-to-all).

    Args:
        shard: Tensor of shape [rows, heads, sequence shard, head dim].
        axis: Mesh axis of context parallelism.
    """
    heads_by_rank = torch.stack(shard.chunk(axis.size, 1))
    return _restore_order(_exchange_rows(heads_by_rank, axis), axis, 2)


def exchange_for_shards(heads: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """Return this rank's sequence shard of all heads, given full sequences of this rank's heads (all-to-all).

    This is the inverse of `exchange_for_heads`.

    Args:
        heads: Tensor of shape [rows, heads of this rank, sequence, head dim].
        axis: Mesh axis of context parallelism.
    """
    shards_by_rank = _stack_by_rank(heads, axis, 2)
    return torch.cat(_exchange_rows(shards_by_rank, axis).unbind(0), 1)


def _exchange_rows(by_rank: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """Send one tensor to each rank, and return the tensors received from them (all-to-all). Differentiable.

    Args:
        by_rank: Tensors of equal shape, stacked by destination rank.
        axis: Mesh axis of context parallelism.
    """
    rows, even = by_rank.reshape(axis.size, -1), [1] * axis.size
    return exchange_rows(rows, axis, even, even, 1.0, nullcontext).view_as(by_rank)


def reduce_scatter_sequence(terms: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """Return this rank's shard of the sum of all ranks' tensors (reduce-scatter). Not differentiable.

    Args:
        terms: This rank's term of the sum, for full sequences.
        axis: Mesh axis of context parallelism.
        dim: Dimension of the sequence.
    """
    stacked = _stack_by_rank(terms, axis, dim % terms.dim())
    return reduce_scatter(stacked.view(-1, *stacked.shape[2:]), axis)


def join_sequence(shard: torch.Tensor, axis: SplitAxis, dim: int, length: int, grad_factor: int = 1) -> torch.Tensor:
    """Return the full sequence, all-gathered without padding, for computations that are identical on all ranks.

    Backward returns this rank's shard of the gradient, without communication.

    Args:
        shard: This rank's shard.
        axis: Mesh axis of context parallelism.
        dim: Dimension of the sequence.
        length: Length of the full sequence without padding.
        grad_factor: Factor by which backward multiplies the gradients. Default: 1.
    """
    dim = dim % shard.dim()

    def split_gradient(grad: torch.Tensor) -> torch.Tensor:
        grad_shard = split_sequence(grad, axis, dim)
        return grad_shard if grad_factor == 1 else grad_shard * grad_factor

    full = apply_with_backward(shard, partial(_gather_sequence, axis=axis, dim=dim), split_gradient)
    return full if full.shape[dim] == length else full.narrow(dim, 0, length).clone()


def divide_gradient(tensor: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """Return the tensor unchanged. Backward divides its gradient by the number of ranks.

    The division is needed because all ranks compute this gradient identically, and their gradients are summed later.
    """
    if not tensor.requires_grad:
        return tensor
    return apply_with_backward(tensor, view_unchanged, lambda grad: grad / axis.size)


def _gather_sequence(shard: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """All-gather a sequence without autograd, in its original order and with padding."""
    return _restore_order(all_gather(shard, axis).view(axis.size, *shard.shape), axis, dim)


def _restore_order(by_rank: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """Return a full sequence in its original order, given the ranks' shards stacked along a new first dimension.

    Args:
        by_rank: Stacked shards, one for each rank.
        axis: Mesh axis of context parallelism.
        dim: Dimension of the sequence in each shard.
    """
    chunk_length = by_rank.shape[dim + 1] // 2
    chunks: list[Any] = [None] * (2 * axis.size)
    for rank in range(axis.size):
        for position, chunk in enumerate(find_chunks(rank, axis)):
            chunks[chunk] = by_rank[rank].narrow(dim, position * chunk_length, chunk_length)
    return torch.cat(chunks, dim)


def _stack_by_rank(full: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """Return the ranks' shards of a full sequence, stacked along a new first dimension."""
    chunks = full.chunk(2 * axis.size, dim)
    shards = [torch.cat([chunks[chunk] for chunk in find_chunks(rank, axis)], dim) for rank in range(axis.size)]
    return torch.stack(shards)
