"""`CausalOnCpu`: causal attention of a rank's queries on a CPU, without a mask of queries by keys."""

from typing import Any

import torch

from headway.layouts.context import sequences
from headway.layouts.context._torch import (
    flash_attention_on_cpu,
    flash_attention_on_cpu_backward,
)
from headway.layouts.tensor.crossings import SplitAxis


class CausalOnCpu(torch.autograd.Function):
    """Autograd function for causal attention of a rank's queries on a CPU.

    Keys and values are all-gathered in forward and again in backward. Between forward and backward, only this rank's
    shard is saved. A rank's queries are two chunks of the sequence. Each chunk takes two calls of the CPU's kernel:
    one for the earlier keys, one for the square on the diagonal. Their outputs are merged with the log-sum-exp of the
    scores (`lse`) that each call returns. The backward of each call gets the merged log-sum-exp and the merged output,
    and so computes this call's share of the gradients (as in ring attention: Liu et al., 2023). No mask of queries by
    keys is allocated.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, axis: SplitAxis, scale: float | None
    ) -> torch.Tensor:
        """Return the attention of this rank's queries to all keys before them, one chunk of the sequence after the other.

        Args:
            ctx: Context of torch's autograd, which saves this rank's shards, not the gathered keys and values.
            query: Queries of this rank's sequence shard.
            key: Keys of this rank's sequence shard.
            value: Values of this rank's sequence shard.
            axis: Mesh axis of context parallelism.
            scale: Factor of the scores. None: torch's default.
        """
        full_key, full_value = _gather_keys_and_values(query, key, value, axis)
        outputs, lses = [], []
        for chunk, start in split_chunks(query, axis):
            chunk_output, chunk_lse = _attend_chunk(chunk, full_key, full_value, start, scale)
            outputs.append(chunk_output)
            lses.append(chunk_lse)
        output, lse = torch.cat(outputs, 2), torch.cat(lses, 2)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.axis, ctx.scale = axis, scale
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Return the gradients of this rank's queries, keys and values. Keys and values are gathered again.

        Each rank computes a term of the gradients of all keys and values. The terms are reduce-scattered.

        Args:
            ctx: Context of torch's autograd.
            grad: Gradient of the output.
        """
        query, key, value, output, lse = ctx.saved_tensors
        axis = ctx.axis
        full_key, full_value = _gather_keys_and_values(query, key, value, axis)
        key_grad, value_grad = torch.zeros_like(full_key), torch.zeros_like(full_value)
        query_grads = []
        for index, (chunk, start) in enumerate(split_chunks(query, axis)):
            length = chunk.shape[2]
            chunk_grad, chunk_output, chunk_lse = (
                tensor.narrow(2, index * length, length).contiguous() for tensor in (grad, output, lse)
            )
            query_grad = torch.zeros_like(chunk)
            # The square on the diagonal, and the earlier keys, of which the first chunk has none.
            for first, end, is_causal in ((start, start + length, True), (0, start, False)):
                if first == end:
                    continue
                tokens = slice(first, end)
                grads = flash_attention_on_cpu_backward(
                    chunk_grad,
                    chunk,
                    full_key[:, :, tokens],
                    full_value[:, :, tokens],
                    chunk_output,
                    chunk_lse,
                    0.0,
                    is_causal,
                    scale=ctx.scale,
                )
                query_grad += grads[0]
                key_grad[:, :, tokens] += grads[1]
                value_grad[:, :, tokens] += grads[2]
            query_grads.append(query_grad)
        terms = torch.cat([_sum_over_heads(key_grad, key), _sum_over_heads(value_grad, value)], -1)
        grads_of_shard = sequences.reduce_scatter_sequence(terms, axis, -2)
        width = key.shape[-1]
        return torch.cat(query_grads, 2), grads_of_shard[..., :width], grads_of_shard[..., width:], None, None


def split_chunks(query: torch.Tensor, axis: SplitAxis) -> list[tuple[torch.Tensor, int]]:
    """Split this rank's queries into the two contiguous chunks of the sequence that the rank holds.

    Returns:
        Pairs of (chunk of the queries, index of the chunk's first token in the sequence).
    """
    length = query.shape[2] // 2
    return [
        (query.narrow(2, position * length, length), chunk * length)
        for position, chunk in enumerate(sequences.find_chunks(axis.rank, axis))
    ]


def _gather_keys_and_values(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, axis: SplitAxis
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of the full sequence, with heads repeated to match the queries.

    Heads are repeated after the gather, so that each head is sent only once.
    """
    keys_and_values = sequences.gather_sequence(torch.cat([key, value], -1), axis, -2)
    num_repeats = query.shape[1] // key.shape[1]
    if num_repeats > 1:
        keys_and_values = keys_and_values.repeat_interleave(num_repeats, 1)
    return keys_and_values[..., : key.shape[-1]], keys_and_values[..., key.shape[-1] :]


def _sum_over_heads(grad: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Return the gradient of keys or values, summed over the query heads that share a key head.

    Args:
        grad: Gradient with one head per query head.
        shard: Keys or values of this rank, with as many heads or fewer.
    """
    num_repeats = grad.shape[1] // shard.shape[1]
    return grad if num_repeats == 1 else grad.view(grad.shape[0], -1, num_repeats, *grad.shape[2:]).sum(2)


def _attend_chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the causal attention output of queries that are contiguous in the sequence, and its log-sum-exp.

    Args:
        query: Contiguous queries, [rows, heads, tokens, head dim].
        key: Keys of the full sequence.
        value: Values of the full sequence.
        start: Position of the first query in the sequence.
        scale: Factor for the scores; None for torch's default.
    """
    end = start + query.shape[2]
    diagonal, diagonal_lse, *_ = flash_attention_on_cpu(
        query, key[:, :, start:end], value[:, :, start:end], 0.0, True, scale=scale
    )
    if not start:
        return diagonal, diagonal_lse
    earlier, earlier_lse, *_ = flash_attention_on_cpu(
        query, key[:, :, :start], value[:, :, :start], 0.0, False, scale=scale
    )
    lse = torch.logaddexp(diagonal_lse, earlier_lse)
    diagonal_share, earlier_share = ((part - lse).exp().unsqueeze(-1) for part in (diagonal_lse, earlier_lse))
    return (diagonal * diagonal_share + earlier * earlier_share).to(query.dtype), lse
