"""Gather the full values of sharded tensors, including those that torch cannot gather."""

import torch
import torch.distributed as dist

from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from headway.core.weights.pieces import is_dtensor, list_own_boxes, make_slices


def gather_whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full values of a tensor on all ranks of its mesh. A plain tensor is returned unchanged.

    All ranks of the mesh must call this function.

    torch's `full_tensor()` raises an error for tensors with two strided shards. Under fsdp+ep+tp, experts have two: one
    for the order of the axes, and one for packed matrices.
    """
    if not is_dtensor(tensor):
        return tensor
    if sum(getattr(placed, "split_factor", 1) > 1 for placed in tensor.placements) < 2:
        return tensor.full_tensor()
    mesh, copies = tensor.device_mesh, [axis for axis, placed in enumerate(tensor.placements) if placed.is_replicate()]
    whole = torch.zeros(tensor.shape, dtype=tensor.dtype, device=get_local_shard(tensor).device)
    if not any(mesh.get_local_rank(axis) for axis in copies):  # of equal copies, the first one counts
        for offsets, values in list_own_boxes(tensor):
            whole[make_slices(offsets, values.shape)] = values
    for axis in range(mesh.ndim):
        dist.all_reduce(whole.view(-1).view(torch.uint8), group=mesh.get_group(axis))  # keeps the bits of -0.0
    return whole
