"""Flat partitions, as DeepSpeed's ZeRO cuts parameters: a range of a tensor's values in order, as boxes of the tensor."""

from collections.abc import Iterator, Sequence
from math import prod

import torch

from headway.weights.pieces import ShardPiece, TensorBox


def boxes_of(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(where it begins, its shape) of boxes that hold the values `start` to `stop` of a tensor in order: two a dim at the most."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _within(shape, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _within(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * row < stop:
        yield from _within(shape, last, 0, stop - last * row)


def _within(
    shape: Sequence[int], index: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offsets, size in boxes_of(shape[1:], start, stop):
        yield (index, *offsets), (1, *size)


def piece_of_range(shape: Sequence[int], flat: torch.Tensor, start: int, is_written: bool) -> ShardPiece:
    """What a rank holds whose memory `flat` is a range of a tensor's values, from `start` on.

    Args:
        shape: of the tensor.
        flat: contiguous, of one dim; written to where a checkpoint is loaded.
        start: where it begins among the values.
        is_written: does this rank write it into checkpoints?
    """
    boxes, place = [], 0
    for offsets, size in boxes_of(shape, start, start + flat.numel()):
        count = prod(size)
        boxes.append(TensorBox(offsets, flat[place : place + count].view(size), is_written))
        place += count
    return ShardPiece(tuple(shape), flat.dtype, tuple(boxes))
