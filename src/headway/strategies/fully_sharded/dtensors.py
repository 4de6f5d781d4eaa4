"""Sharded tensors (DTensors): gradients, their norm over all ranks, and single numbers.

One number of a sharded tensor: `item()` of a sum over parts is the whole sum, as it is of a plain tensor.

torch's DTensor takes this rank's term for it, so that a norm summed up by hand (`p.grad.pow(2).sum().item()`) is another wrong
number on each rank. What DTensors do in an operation stands in their dispatcher's table, which is open to others: torch's own
context parallelism comes and goes there.
"""

import math
import os
import traceback
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from headway.common.optional import Later
from headway.errors import LossError
from headway.runtime import process
from headway.runtime.collectives.checked import Collectives
from headway.runtime.control_plane.attendance import RankConditionalCallCheck
from headway.runtime.process import ProcessRuntime
from headway.weights.pieces import is_dtensor, own_boxes, places, slices

if TYPE_CHECKING:
    from torch.distributed import tensor as dtensor
else:
    dtensor = Later("torch.distributed.tensor")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def put_whole(own: torch.Tensor, whole: torch.Tensor) -> None:
    """Put a whole tensor's values into a plain one, or into this rank's part of a DTensor."""
    for offsets, memory in own_boxes(own):
        memory.copy_(whole[slices(offsets, memory.shape)])


def cut_like(tensor: torch.Tensor, like: Any) -> torch.Tensor:
    """A whole tensor as a DTensor that is cut as `like`; no rank asks another."""
    if is_dtensor(tensor) or not is_dtensor(like):
        return tensor
    whole = tensor.detach()
    boxes = ((offsets, whole[slices(offsets, local(like)[where].shape)]) for offsets, where in places(like))
    return join(boxes, tensor.dtype, like)


def join(boxes: Iterable[tuple[tuple[int, ...], torch.Tensor]], dtype: torch.dtype, like: Any) -> torch.Tensor:
    """A DTensor that is cut as `like`, of this rank's boxes: (where each begins, its values)."""
    part, where = torch.empty(local(like).shape, dtype=dtype, device=local(like).device), dict(places(like))
    for offsets, values in boxes:
        part[where[offsets]].copy_(values)
    return around(part, like)


def around(part: torch.Tensor, like: Any) -> torch.Tensor:
    """What this rank holds, as a DTensor that is cut as `like`."""
    return placed(part, like.device_mesh, like.placements, like.shape, like.stride())


def placed(part: torch.Tensor, mesh: Any, placements: Any, shape: torch.Size, stride: Any = None) -> torch.Tensor:
    """What this rank holds of a tensor of that shape, as a DTensor; without a stride, the whole is contiguous."""
    stride = torch.empty(shape, device="meta").stride() if stride is None else stride
    return dtensor.DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


_PARTS = (
    "the parameters of a sharded model are DTensors outside of its forward, and torch cannot do everything with them. Call the model "
    "itself, not model.forward() or a part of it. For arithmetic of your own with parameters or gradients, take p.full_tensor() on "
    "all ranks. If an optimizer's step failed, try foreach=False; one that needs whole tensors works under ddp"
)
_ADVICE = {
    "got mixed torch.Tensor and DTensor": _PARTS,
    "is not supported for tensor subclasses": _PARTS,
    "appears to not have been used in the graph": "if these are parameters of a sharded model, torch.autograd.grad does not find "
    "them: accelerator.backward(loss) puts their gradients into p.grad",
    "Tensor on device meta is not on the expected device": "in a pipeline, parameters of other stages are on the meta device. Make "
    "the loss of the model's outputs alone; in place of a penalty on weights, use the optimizer's weight_decay",
}
"""By what torch's errors say."""


def explain(error: BaseException) -> str:
    """What to say after torch's error in an operation that DTensors or a stage's parameters cannot do; nothing of any other."""
    last = traceback.extract_tb(error.__traceback__, limit=-1)
    is_theirs = any("/torch/distributed/tensor/" in frame.filename.replace(os.sep, "/") for frame in last)
    found = next((advice for text, advice in _ADVICE.items() if text in str(error)), _PARTS if is_theirs else "")
    return found and f"headway: {found}"


def is_of_parameters(loss: torch.Tensor) -> bool:
    """Is it made of sharded parameters alone, as a penalty on weights is? Logits that are cut are DTensors, too.

    Raises:
        LossError: plain tensors are added to them, to which no gradient would find its way.
    """
    if not is_dtensor(loss):
        return False
    is_alone, seen, left = True, set[Any](), [loss.grad_fn]
    while left:
        node: Any = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if "FromTorchTensor" in node.name():  # from here on gradients are plain
            is_alone = False
        elif "ToTorchTensor" in node.name() or (leaf is not None and not is_dtensor(leaf)):
            raise LossError(
                "the loss adds plain tensors to parameters, which are DTensors in this layout. Give what is made of parameters "
                "alone, such as a penalty on weights, a backward of its own in the same micro-batch: accelerator.backward(penalty)"
            )
        else:
            left += [following for following, _ in node.next_functions]
    return is_alone


def complete(parameter: torch.Tensor) -> torch.Tensor | None:
    """The parameter's gradient, summed: one that each rank knows a part of as a sum (Partial) is summed first."""
    grad: Any = parameter.grad
    if grad is None or not is_dtensor(grad) or not any(p.is_partial() for p in grad.placements):
        return grad  # type: ignore[no-any-return]
    wanted = [dtensor.Replicate() if p.is_partial() else p for p in grad.placements]
    parameter.grad = grad.redistribute(placements=wanted)
    return parameter.grad


def local_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's parts of the gradients that there are."""
    found = [complete(parameter) for parameter in parameters]
    return [local(grad) for grad in found if grad is not None]


def copies(tensor: torch.Tensor, num_ranks: int) -> int:
    """On how many of so many ranks the same elements lie."""
    if not is_dtensor(tensor):
        return num_ranks
    mesh: Any = tensor.device_mesh
    cut: list[int] = [mesh.size(dim) for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return num_ranks // math.prod(cut)


def total_norm(
    parameters: Iterable[torch.Tensor], norm_type: float, everyone: Collectives, num_holders: int | None = None
) -> torch.Tensor:
    """The norm of all gradients together, a plain 0-d tensor, the same on all ranks; one exchange.

    Each element counts once, on however many ranks it lies. A value that is not finite on any rank reaches all.

    Args:
        parameters: whose gradients.
        norm_type: 2 for the Euclidean norm.
        everyone: the ranks that hold them.
        num_holders: how many of these hold what this one holds, or parts of it, where a rank may have none; None: all.
    """
    alike: dict[tuple[int, torch.device, torch.dtype], list[torch.Tensor]] = {}
    device, dtype = torch.device("cpu") if num_holders is None else everyone.runtime.device, torch.float32
    for parameter in parameters:
        grad = complete(parameter)
        if grad is not None:
            part = local(grad)
            device, dtype = part.device, torch.promote_types(dtype, part.dtype)
            if part.numel():
                key = copies(grad, num_holders or everyone.world_size), part.device, part.dtype
                alike.setdefault(key, []).append(part.detach())
    # Where gradients lie on several devices (offloaded ones among them), the sum is made on the CPU.
    device = device if all(key[1] == device for key in alike) else torch.device("cpu")
    is_maximum = math.isinf(norm_type)
    total = torch.zeros((), dtype=wide(device), device=device)
    for (count, _, kind), parts in alike.items():
        working = torch.float32 if kind in (torch.float16, torch.bfloat16) else None
        norms = torch.stack(torch._foreach_norm(parts, norm_type, dtype=working)).to(device, total.dtype)
        total = torch.maximum(total, norms.max()) if is_maximum else total + norms.pow(norm_type).sum() / count
    return _over_ranks(total, norm_type, everyone).to(dtype)


def _over_ranks(total: torch.Tensor, norm_type: float, everyone: Collectives) -> torch.Tensor:
    if math.isinf(norm_type):
        # A nan is lost in an engine's maximum: it travels as one more number.
        pair = torch.stack([total.nan_to_num(nan=0.0, posinf=math.inf), (~total.isfinite()).to(total.dtype)])
        highest, is_bad = everyone.reduce(pair, "max")
        return torch.where(is_bad > 0, torch.full_like(highest, math.nan), highest)
    total = total.reshape(1)
    everyone.sum_in_place([total])
    return total.reshape(()).pow(1.0 / norm_type)


def wide(device: torch.device) -> torch.dtype:
    """Squares of large norms do not fit into float32; some devices have nothing wider."""
    return torch.float32 if device.type == "mps" else torch.float64


_ITEM = torch.ops.aten._local_scalar_dense.default


class WholeScalars:
    """The process's entry in that table, until its runtime ends, to which this belongs."""

    def __init__(self) -> None:
        self._calls: RankConditionalCallCheck | None = None
        self._table: dict[Any, Any] = dtensor.DTensor._op_dispatcher._custom_op_handlers
        self._entry = self._item

    def enter(self, runtime: ProcessRuntime) -> None:
        """From now on; where it is entered already, nothing changes."""
        if self._calls is None:
            self._calls = RankConditionalCallCheck(runtime, "sharded")
            self._table.setdefault(_ITEM, self._entry)
            process.at_end(self.release)

    def _item(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Where ranks hold terms or parts of it, an exchange among all ranks of its mesh.

        Raises:
            UnsupportedError: not all of them come here.
        """
        number = args[0]
        if all(placed.is_replicate() for placed in number.placements):
            return number.to_local().item()
        if self._calls is not None:
            self._calls.check("item() of a number that is summed over parts is called", "the number")
        return number.full_tensor().item()

    def release(self) -> None:
        """Leave torch as it was."""
        if self._table.get(_ITEM) is self._entry:
            del self._table[_ITEM]
