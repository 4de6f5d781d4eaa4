"""Helpers for DTensors: conversions, shards, and gradients."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from headway.common.optional import LazyModule
from headway.core.weights.dtensor_boxes import iterate_boxes, list_own_boxes
from headway.core.weights.pieces import is_dtensor, make_slices
from headway.errors import LossError

if TYPE_CHECKING:
    from torch.distributed import tensor as dtensor
else:
    dtensor = LazyModule("torch.distributed.tensor")


def get_local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor as a plain tensor. A plain tensor is returned unchanged."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def copy_full_values(target: torch.Tensor, full: torch.Tensor) -> None:
    """Copy the values of a full tensor into a tensor of this rank. If it is a DTensor, only this rank's shard is copied.

    Args:
        target: Plain tensor, or DTensor whose local shard is filled.
        full: Full tensor with the values.
    """
    for offsets, memory in list_own_boxes(target):
        memory.copy_(full[make_slices(offsets, memory.shape)])


def shard_like(tensor: torch.Tensor, template: Any) -> torch.Tensor:
    """Return a full tensor as a DTensor that is sharded like `template`. Requires no communication.

    The tensor is returned unchanged if it is a DTensor already, or if `template` is not one.
    """
    if is_dtensor(tensor) or not is_dtensor(template):
        return tensor
    full, local_shard = tensor.detach(), get_local_shard(template)
    boxes = (
        (offsets, full[make_slices(offsets, local_shard[local_slices].shape)])
        for offsets, local_slices in iterate_boxes(template)
    )
    return assemble_boxes(boxes, tensor.dtype, template)


def assemble_boxes(
    boxes: Iterable[tuple[tuple[int, ...], torch.Tensor]], dtype: torch.dtype, template: Any
) -> torch.Tensor:
    """Assemble a DTensor, sharded like another one, from rectangular parts of this rank's shard.

    Args:
        boxes: Offsets in the full tensor, and values, of each part.
        dtype: Dtype of the result.
        template: DTensor whose shape and sharding are copied.
    """
    local_shard = get_local_shard(template)
    result = torch.empty(local_shard.shape, dtype=dtype, device=local_shard.device)
    slices_by_offsets = dict(iterate_boxes(template))
    for offsets, values in boxes:
        result[slices_by_offsets[offsets]].copy_(values)
    return wrap_like(result, template)


def wrap_like(shard: torch.Tensor, template: Any) -> torch.Tensor:
    """Wrap this rank's shard in a DTensor with the shape and sharding of another DTensor."""
    return wrap_shard(shard, template.device_mesh, template.placements, template.shape, template.stride())


def wrap_shard(shard: torch.Tensor, mesh: Any, placements: Any, shape: torch.Size, stride: Any = None) -> torch.Tensor:
    """Wrap this rank's shard of a tensor in a DTensor. Requires no communication.

    Args:
        shard: This rank's shard.
        mesh: DeviceMesh of the ranks.
        placements: Placement along each axis of the mesh.
        shape: Shape of the full tensor.
        stride: Stride of the full tensor. If None, the tensor is contiguous.
    """
    stride = torch.empty(shape, device="meta").stride() if stride is None else stride
    return dtensor.DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=stride)


def wrap_replica(tensor: torch.Tensor, template: Any) -> torch.Tensor:
    """Wrap a tensor that is equal on all ranks in a replicated DTensor. Requires no communication. A DTensor is unchanged.

    Args:
        tensor: Full tensor.
        template: DTensor whose mesh is used.
    """
    if is_dtensor(tensor):
        return tensor
    return wrap_shard(tensor, template.device_mesh, [dtensor.Replicate()] * template.device_mesh.ndim, tensor.shape)


def is_from_parameters(loss: torch.Tensor) -> bool:
    """Whether a loss is computed from sharded parameters alone, such as a penalty on weights.

    The loss's type does not show this, because a loss computed from sharded logits is a DTensor, too.

    Raises:
        LossError: If the loss adds plain tensors to parameters, because gradients would not reach those tensors.
    """
    if not is_dtensor(loss):
        return False
    is_from_parameters_alone = True
    seen: set[Any] = set()
    stack: list[Any] = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if "FromTorchTensor" in node.name():  # behind this node gradients are plain tensors
            is_from_parameters_alone = False
        elif leaf is not None and not is_dtensor(leaf) and leaf.ndim == 0:
            raise LossError(
                "the loss adds a parameter without dimensions, which stays a plain tensor, to sharded parameters. Leave it out of "
                "this term: [p for p in model.parameters() if p.ndim], and call backward separately for its own term"
            )
        elif "ToTorchTensor" in node.name() or (leaf is not None and not is_dtensor(leaf)):
            raise LossError(
                "the loss adds plain tensors to parameters, which are DTensors in this layout. For a term that is computed from "
                "parameters alone, such as a weight penalty, call backward separately in the same micro-batch: "
                "accelerator.backward(penalty)"
            )
        else:
            stack += [next_node for next_node, _ in node.next_functions]
    return is_from_parameters_alone


def complete_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the parameter's gradient after summing partial sums over ranks, or None if it has no gradient.

    If the gradient is a DTensor with a placement `Partial`, the sum is a collective, and it replaces `parameter.grad`.
    """
    grad: Any = parameter.grad
    if grad is None or not is_dtensor(grad) or not any(p.is_partial() for p in grad.placements):
        return grad  # type: ignore[no-any-return]
    placements = [dtensor.Replicate() if p.is_partial() else p for p in grad.placements]
    parameter.grad = grad.redistribute(placements=placements)
    return parameter.grad


def get_local_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's shards of the existing gradients of `parameters`, after summing partial sums over ranks."""
    grads = [complete_gradient(parameter) for parameter in parameters]
    return [get_local_shard(grad) for grad in grads if grad is not None]


def count_shards(tensor: torch.Tensor) -> dict[int, int]:
    """Return the number of shards along each sharded dimension of a tensor, by dimension; empty if none is sharded."""
    counts: dict[int, int] = {}
    if is_dtensor(tensor):
        for axis, placement in enumerate(tensor.placements):
            dimension = getattr(placement, "dim", None)  # strided shards have it, too
            if dimension is not None:
                counts[dimension] = counts.get(dimension, 1) * tensor.device_mesh.size(axis)
    return counts
