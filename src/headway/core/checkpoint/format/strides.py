"""Save and restore the strides of tensors.

Files hold the values of a tensor in row-major order. In another memory layout, sums and matrix products round
differently, and a resumed run would not be bit-identical.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from headway.core.weights.pieces import ShardPiece, get_local_part, is_dtensor, replace_local
from headway.core.weights.tensor_bytes import view_as_bits
from headway.errors import CheckpointError

_MAX_SPAN_FACTOR, _MAX_SPAN_BYTES = 16, 16 * 2**20
"""Limits for views with gaps between their elements. A view that exceeds them is saved without its stride.

A view may span `_MAX_SPAN_FACTOR` times the memory of its elements, or `_MAX_SPAN_BYTES` bytes. The larger of the two
limits applies. Without a limit, a manifest could claim unbounded memory.
"""


def get_saved_stride(tensor: Any) -> list[int] | None:
    """Return the stride that a checkpoint records for a tensor, so that a load can restore it.

    Return None if the tensor is in row-major order or is a `ShardPiece`. For a view whose elements are too far apart,
    return a stride without gaps.

    Args:
        tensor: Strided tensor, DTensor or `ShardPiece`. For a DTensor, the result is the stride of the full tensor,
            without gaps.
    """
    if isinstance(tensor, ShardPiece):
        return None
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    if tensor.is_contiguous() and 0 not in shape and 1 not in shape:
        return None  # the usual case, checked first
    if is_dtensor(tensor) or not _is_bounded(shape, stride, tensor.element_size()):
        stride = _make_dense_stride(shape, stride)
    return None if stride == _make_dense_stride(shape) else list(stride)


def set_stride(tensor: Any, stride: Sequence[int]) -> Any:
    """Return a tensor with the given stride and equal values.

    A tensor that already has the stride is returned unchanged.

    Args:
        tensor: Dense tensor or DTensor. Other objects are returned unchanged.
        stride: One number per dim, as `get_saved_stride` returns it.

    Raises:
        CheckpointError: If the stride does not fit the shape, or takes too much memory.
    """
    if not isinstance(tensor, torch.Tensor):
        return tensor  # a shard that is not a DTensor has no stride
    new_stride, shape = tuple(stride), tuple(tensor.shape)
    is_sound = len(new_stride) == len(shape) and all(type(each) is int and 0 <= each < 2**62 for each in new_stride)
    if not is_sound or not _is_bounded(shape, new_stride, tensor.element_size()):
        raise CheckpointError(f"the manifest has the stride {list(stride)!r} of a tensor of shape {shape}")
    if tuple(tensor.stride()) == new_stride:
        return tensor
    if is_dtensor(tensor):
        local = get_local_part(tensor)
        return replace_local(tensor, set_stride(local, _make_dense_stride(tuple(local.shape), new_stride)), new_stride)
    result = torch.empty_strided(shape, new_stride, dtype=tensor.dtype, device=tensor.device)
    target, values = view_as_bits(result), view_as_bits(tensor.detach())
    for dim, (size, step) in enumerate(zip(shape, new_stride)):
        if step == 0 and size > 1:  # as expand() makes it: torch refuses to write one element several times
            target, values = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    target.copy_(values)
    return result


def _make_dense_stride(shape: Sequence[int], like: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return a stride without gaps between elements, with dims in the order of the stride `like`.

    Args:
        shape: Shape of the tensor.
        like: Stride that determines the order of dims. Default: None, row-major order.
    """
    dims = range(len(shape)) if like is None else sorted(range(len(shape)), key=lambda dim: -like[dim])
    stride, step = [0] * len(shape), 1
    for dim in reversed(dims):
        stride[dim] = step
        step *= max(1, shape[dim])
    return tuple(stride)


def _is_bounded(shape: Sequence[int], stride: Sequence[int], item_bytes: int) -> bool:
    """Whether the memory that a tensor spans, including gaps between its elements, is within the limits.

    Args:
        shape: Shape of the tensor.
        stride: Stride of the tensor.
        item_bytes: Bytes per element.
    """
    if not prod(shape):
        return True
    span = 1 + sum((size - 1) * step for size, step in zip(shape, stride))
    return span <= max(_MAX_SPAN_FACTOR * prod(shape), _MAX_SPAN_BYTES // item_bytes)
