"""Full values and memory addresses of tensors that may be sharded."""

import torch
import torch.distributed as dist

from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from headway.core.weights.dtensor_boxes import list_own_boxes
from headway.core.weights.pieces import is_dtensor, make_slices


def get_address(tensor: torch.Tensor) -> int:
    """Return the memory address of a tensor's storage, or of this rank's shard if the tensor is a DTensor.

    Return -1 if the tensor has no memory.
    """
    try:
        return get_local_shard(tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return -1


def gather_full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full values of a tensor on all ranks of its mesh. A plain tensor is returned unchanged.

    All ranks of the mesh must call this function.

    torch's `full_tensor()` raises an error for tensors with two strided shards. Under fsdp+ep+tp, experts have two: one
    for the order of the axes, and one for packed matrices.
    """
    if not is_dtensor(tensor):
        return tensor
    num_strided = sum(getattr(placement, "split_factor", 1) > 1 for placement in tensor.placements)
    if num_strided < 2:
        return tensor.full_tensor()
    mesh = tensor.device_mesh
    replicated_axes = [axis for axis, placement in enumerate(tensor.placements) if placement.is_replicate()]
    full = torch.zeros(tensor.shape, dtype=tensor.dtype, device=get_local_shard(tensor).device)
    # The shards are summed over all ranks, so only one of several equal copies may contribute.
    if not any(mesh.get_local_rank(axis) for axis in replicated_axes):
        for offsets, values in list_own_boxes(tensor):
            full[make_slices(offsets, values.shape)] = values
    for axis in range(mesh.ndim):
        # Each element is not 0 on one rank only, so a sum of bytes keeps all bits, unlike a sum of floats with -0.0.
        dist.all_reduce(full.view(-1).view(torch.uint8), group=mesh.get_group(axis))
    return full
