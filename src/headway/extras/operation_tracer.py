"""Trace the operations of a forward and backward pass, to find where a non-finite value was created.

A `TorchDispatchMode` checks each operation. Each non-finite value is labeled with its origin: an operation that created
the value from finite inputs, a weight, or a tensor from outside the model, such as the batch. The label is dropped if
the value becomes finite again, as -inf does in a softmax. If an inf was written on purpose (`masked_fill` and similar),
the operation that turned it into NaN is the origin.

Hooks on all modules show which module is running. An operation in backward is assigned to the module whose call created
the operation's autograd node, which is found by autograd's sequence numbers. The operation is also assigned to the
source line that anomaly mode has recorded for the node.
"""

import re
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as hooks

from headway.common.callsite import Frame, is_user_file, walk_stack
from headway.core.runtime.collectives.tree import list_tensors
from headway.core.strategies.blocks import get_class_name
from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from headway.core.training.interfaces import NanOrigin
from headway.core.training.prepared.objects import PreparedObjects
from headway.extras._torch import TorchDispatchMode, current_autograd_node, disable_current_modes, get_sequence_number

_MAX_ROWS = 8
"""Maximum number of batch rows that an origin lists."""

# Parts of the names of operations with which scripts write an inf on purpose, for example to mask attention scores.
_ON_PURPOSE = ("fill", "full", "where", "scatter", "index_put", "masked", "triu", "tril", "scalar_tensor", "lift")

# These operations only write to their first argument, so its old values do not matter.
_OVERWRITTEN = ("copy_", "fill_", "zero_", "normal_", "uniform_", "set_")

_TORCH_FOLDER = torch.__file__.removesuffix("__init__.py")
"""Directory of the torch package, whose source lines are never reported as the user's.

It can be outside of the directory of this Python environment.
"""

_TRACEBACK_LINE = re.compile(r'\s*File "(.*)", line (\d+), in (\S+)')
"""Line of a stack that anomaly mode has recorded for an autograd node."""


class _ModuleCall(NamedTuple):
    """Call of a module, as the range of the sequence numbers of the autograd nodes that it created.

    Attributes:
        name: Name of the module.
        start: First sequence number.
        end: Sequence number after the last one. 0 while the call is in progress.
    """

    name: str
    start: int
    end: int = 0


class OperationTracer(TorchDispatchMode):
    """Dispatch mode that checks the result of each operation, and labels non-finite values with their origin.

    Args:
        prepared: Registry of the prepared models, from which origins get the names of modules and weights.
        rank: Rank of this process.

    Attributes:
        num_rows: Number of rows in the current batch, set by the caller. 0: unknown.
        loss_origin: Origin of a loss that was not finite, or None.
        backward_origin: Origin of the first non-finite value in a backward pass, or None.
    """

    def __init__(self, prepared: PreparedObjects, rank: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rank, self.num_rows = rank, 0
        has_several = len(prepared.models) > 1
        self._module_names: dict[int, str] = {}  # by `id` of the module
        # The keys of the following dicts identify storages: see `_get_storage_key`.
        self._weight_names: dict[int, str] = {}
        self._input_modules: dict[int, str] = {}  # name of the outermost module that got the tensor as an argument
        self._labels: dict[int, tuple[StorageWeakRef, NanOrigin]] = {}  # the reference keeps the key from being reused
        for number, model in enumerate(prepared.reshard_models()):
            label = (
                f"model {number} ({get_class_name(model)})" if has_several else f"the model ({get_class_name(model)})"
            )
            for name, each in model.named_modules():
                self._module_names.setdefault(id(each), name or label)
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                self._weight_names[_get_storage_key(tensor)] = name
        self._calls: list[_ModuleCall] = []  # in progress, outermost first
        self._ended_calls: list[_ModuleCall] = []
        self.loss_origin: NanOrigin | None = None
        self.backward_origin: NanOrigin | None = None
        self._block = ExitStack()

    def __enter__(self) -> Any:
        """Start checking results: register hooks on all modules, and enable autograd's anomaly mode."""
        anomaly = torch.autograd.set_detect_anomaly(True, check_nan=False)
        self._block.callback(anomaly.__exit__)
        self._block.callback(hooks.register_module_forward_pre_hook(self._enter_module).remove)
        self._block.callback(hooks.register_module_forward_hook(self._leave_module, always_call=True).remove)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        """Stop checking operations, remove the hooks and end anomaly mode."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._block.close()

    # ---------------------------------------------------------------- modules

    def _enter_module(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """Record that a module's forward begins, and label the module's own weights that contain NaN or inf.

        The tensors that an outermost module call gets as arguments are recorded as inputs.
        """
        name = self._module_names.get(id(module), get_class_name(module))
        if not self._calls:
            for tensor in filter(_has_values, list_tensors(args)):
                self._input_modules.setdefault(_get_storage_key(tensor), name)
        self._calls.append(_ModuleCall(name, get_sequence_number()))
        for own_name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if _has_values(tensor) and not _is_finite(tensor):
                is_root = " " in name  # "the model (Net)", which is no prefix of its parameters' names
                full_name = own_name if is_root else f"{name}.{own_name}"
                self._label_tensor(tensor, NanOrigin("weight", full_name, "", "", (), self._rank))

    def _leave_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Record that a module's forward has ended."""
        if self._calls:
            self._ended_calls.append(self._calls.pop()._replace(end=get_sequence_number()))

    def _find_module(self, node: Any) -> str:
        """Return the name of the innermost module that is running, or "" if there is none.

        Args:
            node: Autograd node whose backward is running, or None in forward. If no module is running, the result is
                the module whose forward created the node.
        """
        if self._calls:
            return self._calls[-1].name
        if node is None:
            return ""
        number = node._sequence_nr()
        around = [call for call in self._ended_calls if call.start <= number < call.end]
        # The innermost call is the shortest. Of calls with equal length, it ended first, and `min` returns the first.
        return min(around, key=lambda call: call.end - call.start).name if around else ""

    # ---------------------------------------------------------------- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and label its non-finite results with their origin.

        Operations that are not torch's own (aten, prims), or that create uninitialized tensors, are not checked.
        """
        kwargs = kwargs or {}
        name = func._schema.name.rpartition("::")[2]
        if func.namespace not in ("aten", "prims") or name.startswith(("empty", "new_empty")):
            return func(*args, **kwargs)
        inputs = [each for each in list_tensors([args, kwargs]) if _has_values(each)]
        if name in _OVERWRITTEN:
            inputs = inputs[1:]
        # An operation can change its inputs, so they are checked first.
        bad_inputs = [each for each in inputs if not _is_finite(each)]
        input_origins = [self._find_origin(each) for each in bad_inputs]
        has_nan_input = any(_has_nan(each) for each in bad_inputs)
        result = func(*args, **kwargs)
        input_keys = {_get_storage_key(each) for each in inputs}
        for output in filter(_has_values, list_tensors(result)):
            key = _get_storage_key(output)
            if key in input_keys and not func._schema.is_mutable:
                continue  # a view
            if _is_finite(output):
                self._labels.pop(key, None)
                continue
            # An inf that was written on purpose, as in an attention mask, is an origin only if it has become NaN.
            faulty_origins = [each for each in input_origins if has_nan_input or not _is_on_purpose(each)]
            if faulty_origins:
                origin = faulty_origins[0]
            elif input_origins and not _has_nan(output):
                origin = input_origins[0]  # still an inf that was written on purpose
            else:
                origin = self._describe_origin(func, name, output, inputs)
            self._label_tensor(output, origin)
            if self.backward_origin is None and current_autograd_node() is not None:
                self.backward_origin = origin
        return result

    def _describe_origin(self, func: Any, name: str, output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> NanOrigin:
        """Return the origin of a non-finite result that an operation has created from good inputs.

        Args:
            func: Operation.
            name: Name of the operation, without namespace and overload.
            output: Result of the operation.
            inputs: Inputs of the operation. If no bad rows are found in the result, they are looked for in the inputs.
        """
        node = current_autograd_node()
        phase = "forward" if node is None else "backward"
        operation = f"{func.namespace}.{name}" + (f" in {node.name()}" if node is not None else "")
        rows = next(filter(None, map(self._find_bad_rows, (output, *inputs))), ())
        return NanOrigin(phase, operation, self._find_module(node), _find_user_line(node), rows, self._rank)

    def _find_origin(self, tensor: torch.Tensor) -> NanOrigin:
        """Return the origin of a tensor's non-finite values.

        If the tensor has no label, it gets one: "weight" for a parameter or buffer, "input" for an argument of an
        outermost module call, such as the batch, and "elsewhere" for any other tensor.
        """
        key = _get_storage_key(tensor)
        if key in self._labels:
            _, origin = self._labels[key]
            return origin
        node, rows = current_autograd_node(), self._find_bad_rows(tensor)
        if key in self._weight_names:
            origin = NanOrigin("weight", self._weight_names[key], "", "", (), self._rank)
        elif key in self._input_modules:
            origin = NanOrigin("input", self._input_modules[key], "", "", rows, self._rank)
        else:
            origin = NanOrigin("elsewhere", "", self._find_module(node), _find_user_line(node), rows, self._rank)
        self._label_tensor(tensor, origin)
        return origin

    def _label_tensor(self, tensor: torch.Tensor, origin: NanOrigin) -> None:
        storage = get_local_shard(tensor).untyped_storage()
        self._labels[storage._cdata] = StorageWeakRef(storage), origin  # type: ignore[no-untyped-call]

    def _find_bad_rows(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return the indices of the first few batch rows (samples) that have non-finite entries in a tensor.

        Return no indices if the number of rows is unknown, or the tensor's first dimension is not a multiple of it.
        """
        local, num_rows = get_local_shard(tensor), self.num_rows
        if not num_rows or not local.ndim or local.shape[0] % num_rows or _is_finite(tensor):
            return ()
        # The first dimension can also be rows times tokens.
        is_bad = ~_find_finite(local.detach()).reshape(num_rows, -1).all(1)
        return tuple(is_bad.nonzero().flatten().tolist()[:_MAX_ROWS])

    def find_gradient_origin(self, parameters: Sequence[torch.Tensor]) -> NanOrigin | None:
        """Return the origin of a non-finite gradient of these parameters, or None if there is none.

        An origin other than "elsewhere" takes precedence. The origin of the first non-finite value in backward comes
        next, then "elsewhere".
        """
        keys = [_get_storage_key(each.grad) for each in parameters if each.grad is not None]
        origins = [self._labels[key][1] for key in keys if key in self._labels]
        for origin in origins:
            if origin.phase != "elsewhere":
                return origin
        return self.backward_origin or next(iter(origins), None)

    def check_loss(self, loss: torch.Tensor) -> None:
        """Record the origin of a loss that is not finite. Called before the backward of the loss.

        Only the first such loss is recorded, in `loss_origin`.
        """
        with disable_current_modes():  # this tracer is an active mode itself, and must not trace the check
            if self.loss_origin is None and not _is_finite(loss):
                self.loss_origin = self._find_origin(loss)


def _get_storage_key(tensor: torch.Tensor) -> int:
    """Return the number that identifies the storage of this rank's shard of a tensor while the storage exists."""
    return int(get_local_shard(tensor).untyped_storage()._cdata)


def _has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values on this rank that can be non-finite."""
    local = get_local_shard(tensor)
    # float4 has neither NaN nor infinity, and torch has no isfinite() for it.
    has_fractions = (local.is_floating_point() and local.dtype != torch.float4_e2m1fn_x2) or local.is_complex()
    return has_fractions and local.layout is torch.strided and not local.is_meta and local.numel() > 0


def _has_nan(tensor: torch.Tensor) -> bool:
    return bool(get_local_shard(tensor).isnan().any())


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(_find_finite(get_local_shard(tensor.detach())).all())


def _find_finite(local: torch.Tensor) -> torch.Tensor:
    """Return a boolean tensor of a local tensor's shape: whether each element is finite."""
    if local.is_floating_point() and local.element_size() == 1:
        local = local.float()  # torch has no isfinite() for some 8-bit dtypes
    return torch.isfinite(local)


def _is_on_purpose(origin: NanOrigin) -> bool:
    """Whether a non-finite value was probably written on purpose, such as the -inf of an attention mask."""
    return origin.phase == "forward" and any(word in origin.operation for word in _ON_PURPOSE)


def _find_user_line(node: Any) -> str:
    """Return the innermost source line in the user's code, or "" if there is none.

    Args:
        node: Autograd node. The line that created it is read from anomaly mode's record. None: use the current stack.
    """
    if node is None:
        places = (Frame.from_frame(frame) for frame in walk_stack())
    else:
        matches = filter(None, map(_TRACEBACK_LINE.match, reversed(node.metadata.get("traceback_", ()))))
        places = (Frame(match[1], int(match[2]), match[3]) for match in matches)
    user_places = (each for each in places if is_user_file(each.file) and not each.file.startswith(_TORCH_FOLDER))
    return str(next(user_places, ""))
