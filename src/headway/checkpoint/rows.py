"""Tensors of which each rank has its own: in a checkpoint, beside the one for all, rows of a tensor that the ranks write together."""

import torch

from headway.weights.pieces import ShardPiece, TensorBox, TensorSplit

ROWS = "rows/"
"""How the names of such tensors begin; what follows is the name of the one for all."""


def row_of(value: torch.Tensor, rank: int, count: int) -> ShardPiece:
    """This rank's row of the tensor that `count` ranks make up."""
    sizes = ((1,) * count, *((size,) for size in value.shape))
    row = TensorBox((rank, *(0 for _ in value.shape)), value.detach()[None], True)
    return ShardPiece((count, *value.shape), value.dtype, (row,), None, TensorSplit(sizes, tuple(range(count))))


def place_of(shape: tuple[int, ...], rank: int) -> ShardPiece:
    """Where a rank's row lies in a tensor of rows."""
    row = TensorBox((rank, *(0 for _ in shape[1:])), torch.empty((1, *shape[1:]), device="meta"), False)
    return ShardPiece(shape, torch.float32, (row,))
