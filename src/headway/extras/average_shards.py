"""Averages of sharded weights: split, wrapped and loaded like the weights that they belong to."""

from collections.abc import Sequence
from typing import Any

import torch

from headway.core.strategies.fully_sharded import dtensors
from headway.core.weights.dtensor_boxes import iterate_boxes
from headway.core.weights.pieces import ShardPiece, TensorBox, get_local_part, is_dtensor, replace_local


def choose_average_dtype(weight_dtype: torch.dtype, requested_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a weight or buffer is averaged. Integers are copied in their own dtype.

    Args:
        weight_dtype: Dtype of the weight or buffer.
        requested_dtype: Dtype of the averages of floating-point weights. None: dtype of the weight, but at least float32.
    """
    if not (weight_dtype.is_floating_point or weight_dtype.is_complex):
        return weight_dtype
    if requested_dtype is not None and not weight_dtype.is_complex:
        return requested_dtype
    if weight_dtype.is_floating_point and weight_dtype.itemsize < torch.float32.itemsize:
        return torch.float32  # torch.promote_types raises an error for float8
    return torch.promote_types(weight_dtype, torch.float32)


def slice_box(tensor: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """Return the part of a full (unsharded) tensor with the given offsets and shape, as a view."""
    return tensor[tuple(slice(start, start + size) for start, size in zip(offsets, shape))]


def _view_like(box: torch.Tensor, local: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the part of `values` at the position that `box` has in `local`, as a view.

    Args:
        box: View of a part of `local`.
        local: This rank's shard of a weight.
        values: Averages with the shape and strides of `local`.
    """
    # `local` can itself be a view of a larger storage, but `values` is not.
    return values.as_strided(box.shape, box.stride(), box.storage_offset() - local.storage_offset())


def list_boxes(tensor: torch.Tensor, values: torch.Tensor) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Return the rectangular parts (boxes) of a weight that this rank's shard consists of.

    Args:
        tensor: Weight, as a plain tensor or a DTensor.
        values: Averages with the shape and strides of this rank's shard of the weight.

    Returns:
        Pairs of (offsets of the box in the whole tensor, part of `values` for the box).
    """
    if not is_dtensor(tensor):
        return [((0,) * tensor.ndim, values)]
    return [(offsets, values[local_slices]) for offsets, local_slices in iterate_boxes(tensor)]


def wrap_like(weight: Any, values: torch.Tensor) -> Any:
    """Return averages as a tensor, DTensor or `ShardPiece` that is sharded like a weight.

    Args:
        weight: Weight, as the run's strategy exports it.
        values: Averages of this rank's shard of the weight.
    """
    if is_dtensor(weight):
        return replace_local(weight, values, weight.stride())
    if not isinstance(weight, ShardPiece):
        return values
    local = get_local_part(weight)
    boxes = tuple(TensorBox(box.offsets, _view_like(box.values, local, values), box.is_written) for box in weight.boxes)
    local_values = None if weight.local is None else values
    return ShardPiece(tuple(weight.shape), values.dtype, boxes, local_values, weight.split)


def make_empty_piece(weight: Any, dtype: torch.dtype | None) -> Any:
    """Return an empty `ShardPiece` for the average of a weight that only other ranks of a pipeline hold.

    Args:
        weight: Weight, as the run's strategy exports it. Only its shape, dtype and split are read.
        dtype: Dtype of the averages of floating-point weights, or None; see `choose_average_dtype`.
    """
    average_dtype = choose_average_dtype(weight.dtype, dtype)
    return ShardPiece(tuple(weight.shape), average_dtype, (), None, getattr(weight, "split", None))


def copy_saved_average(target: Any, saved: Any) -> None:
    """Copy saved averages into this rank's averages.

    Args:
        target: This rank's averages, sharded like the weights.
        saved: Saved averages, as a whole tensor or with the layout of `target`.
    """
    if is_dtensor(target):
        if is_dtensor(saved):
            get_local_part(target).copy_(get_local_part(saved))
        else:
            dtensors.copy_full_values(target, saved)
    elif isinstance(target, ShardPiece):
        saved_boxes = {box.offsets: box.values for box in saved.boxes} if isinstance(saved, ShardPiece) else None
        for box in target.boxes:
            if saved_boxes is None:
                box.values.copy_(slice_box(saved, box.offsets, box.values.shape))
            else:
                box.values.copy_(saved_boxes[box.offsets])
    else:
        target.copy_(saved)
