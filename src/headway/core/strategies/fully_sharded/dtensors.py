"""Helpers for DTensors: conversions, gradients, their norm over all ranks, and `item()`.

`FullScalars` makes `item()` of a sum over shards return the sum over all ranks, as for a plain tensor. torch's
DTensor returns only this rank's term. A norm computed by a script (`p.grad.pow(2).sum().item()`) would then be a
different wrong number on each rank. The handler is registered in DTensor's dispatcher table, which torch's own context
parallelism uses in this way, too.
"""

import math
import os
import traceback
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from headway.common.optional import LazyModule
from headway.core.runtime import process
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.control_plane.conditional_calls import RankConditionalCallCheck
from headway.core.runtime.process import ProcessRuntime
from headway.core.strategies._torch import foreach_norm, local_scalar_dense
from headway.core.weights.pieces import is_dtensor, iterate_boxes, list_own_boxes, make_slices
from headway.errors import LossError, UnsupportedError

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


_DTENSOR_ADVICE = (
    "the parameters of a sharded model are DTensors outside of its forward, and torch cannot do everything with them. Call the model "
    "itself, not model.forward() or a part of it. For arithmetic of your own with parameters or gradients, take p.full_tensor() on "
    "all ranks. To average weights, use headway.ExponentialMovingAverage(model). If an optimizer's step failed, try foreach=False"
)
_ADVICE = {
    "got mixed torch.Tensor and DTensor": _DTENSOR_ADVICE,
    "is not supported for tensor subclasses": _DTENSOR_ADVICE,
    "appears to not have been used in the graph": "if these are parameters of a sharded model, torch.autograd.grad does not find "
    "them: accelerator.backward(loss) puts their gradients into p.grad",
    "Tensor on device meta is not on the expected device": (
        "in a pipeline, parameters of other stages are on the meta device. Compute the loss only from the model's outputs. "
        "Instead of a weight penalty, use the optimizer's weight_decay"
    ),
}
"""Advice for torch errors, by a substring of the error message."""


def explain_error(error: BaseException) -> str:
    """Return advice to append to a torch error message, or "" if there is none for this message.

    The advice is about DTensors and about the parameters of other pipeline stages.
    """
    innermost = traceback.extract_tb(error.__traceback__, limit=-1)
    is_from_dtensor = any("/torch/distributed/tensor/" in frame.filename.replace(os.sep, "/") for frame in innermost)
    default = _DTENSOR_ADVICE if is_from_dtensor else ""
    advice = next((advice for text, advice in _ADVICE.items() if text in str(error)), default)
    return f"headway: {advice}" if advice else ""


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


def count_copies(tensor: torch.Tensor, num_ranks: int) -> int:
    """Return how many of `num_ranks` ranks store each element of the tensor."""
    if not is_dtensor(tensor):
        return num_ranks
    mesh: Any = tensor.device_mesh
    split_sizes: list[int] = [
        mesh.size(axis) for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()
    ]
    return num_ranks // math.prod(split_sizes)


def compute_total_norm(
    parameters: Iterable[torch.Tensor], norm_type: float, everyone: Collectives, num_holders: int | None = None
) -> torch.Tensor:
    """Return the norm of all gradients as a plain 0-d tensor, equal on all ranks. Requires one collective.

    Each element counts once, even if several ranks hold copies of it. A non-finite gradient on one rank enters the
    result on all ranks.

    Args:
        parameters: Parameters whose gradients are measured.
        norm_type: Order of the norm; 2 for the Euclidean norm.
        everyone: Collectives over the ranks that hold the gradients.
        num_holders: Number of ranks that hold this rank's parameters or shards of them. If None, all ranks hold them.
    """
    if norm_type == 0:
        return _count_nonzero(list(parameters), everyone, num_holders)
    # Shards by (number of ranks that hold a copy, device, dtype). One kernel computes the norms of all shards of a key.
    batches: dict[tuple[int, torch.device, torch.dtype], list[torch.Tensor]] = {}
    device = torch.device("cpu") if num_holders is None else everyone.runtime.device
    result_dtype = torch.float32
    for parameter in parameters:
        grad = complete_gradient(parameter)
        if grad is None:
            continue
        shard = get_local_shard(grad)
        device, result_dtype = shard.device, torch.promote_types(result_dtype, shard.dtype)
        if shard.numel():
            key = count_copies(grad, num_holders or everyone.world_size), shard.device, shard.dtype
            batches.setdefault(key, []).append(shard.detach())
    # If gradients are on several devices (some may be offloaded), sum on the CPU.
    if any(shard_device != device for _, shard_device, _ in batches):
        device = torch.device("cpu")
    # The minimum over no elements is infinite, so that a rank without a shard does not determine the result.
    start = math.inf if norm_type == -math.inf else 0.0
    total = torch.full((), start, dtype=choose_norm_dtype(device), device=device)
    for (num_copies, _, dtype), shards in batches.items():
        compute_dtype = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
        norms = torch.stack(foreach_norm(shards, norm_type, dtype=compute_dtype)).to(device, total.dtype)
        if norm_type == math.inf:
            total = torch.maximum(total, norms.max())
        elif norm_type == -math.inf:
            total = torch.minimum(total, norms.min())
        else:
            # Each of the ranks that hold a copy adds an equal share of the term.
            total = total + norms.pow(norm_type).sum() / num_copies
    return _reduce_over_ranks(total, norm_type, everyone).to(result_dtype)


def _count_nonzero(parameters: list[torch.Tensor], everyone: Collectives, num_holders: int | None) -> torch.Tensor:
    """Return the norm of type 0 as torch defines it: the number of gradients with a nonzero element.

    Raises:
        UnsupportedError: In a pipeline with sharded stages, where no rank knows which shards belong to one parameter.
    """
    grads = [complete_gradient(parameter) for parameter in parameters]
    if num_holders is not None and any(is_dtensor(grad) for grad in grads):
        raise UnsupportedError("norm_type=0 is not supported in a pipeline with sharded stages; give another norm_type")
    flags = torch.tensor([0.0 if grad is None else float(get_local_shard(grad).count_nonzero() > 0) for grad in grads])
    if num_holders is not None:
        total = flags.sum().reshape(1) / num_holders
        everyone.sum_in_place([total])
        return total.reshape(())
    everyone.sum_in_place([flags])
    return (flags > 0).sum().float()


def _reduce_over_ranks(total: torch.Tensor, norm_type: float, everyone: Collectives) -> torch.Tensor:
    """Return the norm over all ranks.

    Args:
        total: This rank's sum of powers, or its maximum or minimum for an infinite `norm_type`. A 0-d tensor.
        norm_type: Order of the norm.
        everyone: Collectives over the ranks that hold the gradients.
    """
    if math.isinf(norm_type):
        # A backend's maximum may ignore NaN, so send an additional number that shows a value that is not allowed: NaN, or
        # also infinity for a maximum. The minimum is the maximum of the negated values. torch's norm of no gradients is 0.
        sign = 1.0 if norm_type > 0 else -1.0
        is_bad = ~total.isfinite() if norm_type > 0 else total.isnan()
        pair = torch.stack([sign * total.nan_to_num(nan=0.0, posinf=math.inf), is_bad.to(total.dtype)])
        highest, any_bad = everyone.reduce(pair, "max")
        result = sign * highest
        if norm_type < 0:
            is_without_gradients = result.isinf() & (any_bad == 0)
            result = torch.where(is_without_gradients, torch.zeros_like(result), result)
        return torch.where(any_bad > 0, torch.full_like(result, math.nan), result)
    total = total.reshape(1)
    everyone.sum_in_place([total])
    return total.reshape(()).pow(1.0 / norm_type)


def choose_norm_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for sums of squares: float64, or float32 on devices without it. Large norms overflow float32."""
    return torch.float32 if device.type == "mps" else torch.float64


_ITEM = local_scalar_dense


class FullScalars:
    """Handler that makes `item()` of a DTensor return its full value, such as the sum of all ranks' terms.

    Each process has one handler. It stays registered in DTensor's dispatcher until the process runtime ends.
    """

    def __init__(self) -> None:
        self._call_check: RankConditionalCallCheck | None = None
        self._handlers: dict[Any, Any] = dtensor.DTensor._op_dispatcher._custom_op_handlers
        self._handler = self._compute_item  # kept, because each access to a bound method creates a new object

    def register_handler(self, runtime: ProcessRuntime) -> None:
        """Register the handler, unless it or another handler for `item()` is already registered."""
        if self._call_check is None:
            self._call_check = RankConditionalCallCheck(runtime, "sharded")
            self._handlers.setdefault(_ITEM, self._handler)
            process.release_at_end(self.release)

    def _compute_item(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the value of a 0-d DTensor as a number.

        If ranks hold terms or shards of the value, this is a collective over the DTensor's mesh.

        Raises:
            UnsupportedError: If not all ranks of the mesh call it.
        """
        number = args[0]
        if all(placement.is_replicate() for placement in number.placements):
            return number.to_local().item()
        if self._call_check is not None:
            self._call_check.check("item() of a number that is summed over parts is called", "the number")
        return number.full_tensor().item()

    def release(self) -> None:
        """Remove the handler from DTensor's dispatcher."""
        if self._handlers.get(_ITEM) is self._handler:
            del self._handlers[_ITEM]
