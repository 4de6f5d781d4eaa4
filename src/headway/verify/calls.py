"""`CallTrace`: records the torch calls behind each loss, and the line of the script that makes each call.

If two runs differ, `blame.py` compares these records and finds the first call whose result differs. Only a summary of
each result is recorded: three sums for each row.

This module reads frames of the user's code and their variables. That is acceptable because `headway verify` is a
diagnostic tool: the records only name a line or a variable for the reader. No value of the script is changed.
"""

import inspect
import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from headway.common.callsite import Frame, is_headway_file, is_user_file, walk_stack
from headway.core.weights.pieces import is_dtensor

_MOST_CALLS = 2000
"""Largest number of calls that are recorded for one loss."""
_MOST_ROWS = 128
"""Largest number of rows that are summarized one by one."""
_MOST_SUMMED = 1 << 20
"""Largest number of values from which a summary is computed. Larger tensors are sampled at regular intervals."""
_MOST_STACK = 120
"""Largest number of stack frames that are searched for a line of the script."""
_MOST_KEPT = 20_000
"""Largest number of tensors that are watched in order to find those that stay alive."""
_OWN_CALLS = ("forward", "__call__", "run")
"""Names of Headway functions that can be on the stack between the script and a torch call of the script's model."""
_STEPS = ("torch/optim/", "torch/nn/utils/clip_grad")
"""Parts of the paths of torch's source files whose torch calls belong to the optimizer step."""

_SCALINGS = frozenset(
    ("mul", "rmul", "div", "truediv", "rtruediv", "true_divide", "add", "radd", "sub", "rsub", "pow", "rpow")
)
"""Functions whose number arguments are looked up among the script's variables, so that a report can name them."""
_IN_PLACE = frozenset(
    ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__ipow__", "__iand__", "__ior__")
)
"""Operator methods that change their first argument in place."""
_KEEPS_VALUES = frozenset(("requires_grad_", "detach_", "share_memory_"))
"""Functions that change their first argument in place, but not its values."""

Names = Callable[[], tuple[dict[int, str], dict[int, str]]]
"""Function that returns two dicts of prepared models' tensor names: by the tensor's `id`, and by its memory address."""


class CallTrace:
    """Recorder of the torch calls in one process.

    Args:
        path: File to which records are appended, one JSON line per loss.
        list_names: Function that returns the names of the prepared models' parameters and buffers as two dicts: by the
            tensor's `id`, and by the address of its memory.
        places: Lookup that names modules, gradients, and models that were not passed to `prepare`. Default: a lookup
            that knows none.
        is_enabled: Whether calls may be recorded. A run that measures memory must not keep summaries of tensors.
            Default: True.

    Attributes:
        places: Lookup of modules, gradients and unprepared models, as passed.
        is_on: Whether calls are currently recorded.
        update: Number of the update that is being computed.
        written: Lines of the script that changed a parameter or buffer in place in this update, by the tensor's name.
        written_outside: Lines of the script that changed a model that was not passed to `prepare`, by the model's name.
        gradient_lines: For each line of the script that changed gradients in this update, how many backward passes of
            the update had run before each change.
    """

    def __init__(
        self, path: Path, list_names: Names, places: "TensorPlaces | None" = None, *, is_enabled: bool = True
    ) -> None:
        self._path = path
        self._is_enabled = is_enabled
        self._list_names = list_names
        self.places = places or TensorPlaces()
        self._names: dict[int, str] = {}
        self._storages: dict[int, str] = {}
        self._modules: dict[int, str] = {}
        self._gradients: dict[int, str] | None = None
        self._num_losses = 0
        self._calls: list[dict[str, Any]] = []
        self._known: dict[int, tuple[Any, int]] = {}
        self._rows: int | None = None
        self._kept: list[tuple[int, str, Any]] = []
        self._inputs: list[torch.Tensor] = []
        self._input_calls: list[int] = []
        self._is_busy = False
        self.is_on = False
        self.update = 1
        self.written: dict[str, list[str]] = {}
        self.written_outside: dict[str, list[str]] = {}
        self.gradient_lines: dict[str, list[int]] = {}

    # ---------------------------------------------------------------- phases

    def begin_batch(self, num_rows: int | None) -> None:
        """Start to record the calls of a new batch, and discard recorded calls that no loss has used.

        Args:
            num_rows: Number of rows of the batch in this process, or None if it is unknown.
        """
        self._calls, self._known, self._rows = [], {}, num_rows
        self.is_on = self._is_enabled

    def pause_recording(self) -> None:
        """Stop recording calls until `begin_batch` or `resume` is called."""
        self.is_on = False

    def resume(self) -> None:
        """Record calls again, unless recording is disabled (`is_enabled`)."""
        self.is_on = self._is_enabled

    def close(self, loss: torch.Tensor, weight: float | None, reduction: str) -> None:
        """Write a record of the calls behind a loss to the trace file, discard the calls, and stop recording.

        Args:
            loss: Loss whose backward pass is about to run.
            weight: Loss weight that the script passed, or None.
            reduction: "mean" or "sum", as the script passed it.
        """
        self.is_on = False
        self._gradients = None
        self._num_losses += 1
        entry = {
            "update": self.update,
            "rows": self._rows,
            "loss": self._find_call(loss),
            "value": float(loss.detach().float().mean()),
            "weight": weight,
            "reduction": reduction,
            "line": find_line(),
            "calls": self._calls,
        }
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        self._calls, self._known, self._inputs, self._input_calls = [], {}, [], []

    def void_last_loss(self) -> None:
        """Mark the last recorded loss as void, because its backward pass failed. It is then not part of the update."""
        with self._path.open("a") as file:
            file.write(json.dumps({"update": self.update, "is_void": True}) + "\n")

    # ---------------------------------------------------------------- calls

    def note_inputs(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Store a model's inputs, in order to recognize a loss whose target is an input shifted by one step.

        Only floating-point inputs with at least two dimensions are stored, and only in the first update.

        Args:
            args: Positional arguments of the model.
            kwargs: Keyword arguments of the model.
        """
        if self.update == 1 and self.is_on:
            floats = [
                each for each in _list_tensors([list(args), kwargs]) if each.is_floating_point() and each.ndim > 1
            ]
            self._inputs = [each.detach() for each in floats[:4] if each.numel() <= _MOST_SUMMED]
            self._input_calls = [self._find_call(each) for each in floats[:4] if each.numel() <= _MOST_SUMMED]

    def _find_predicted(self, target: torch.Tensor) -> int:
        """Find the model input that equals a loss's target if the input is shifted by one step in the last dimension.

        Return the index of the torch call that made this input; -1 if there is no such input.

        Args:
            target: Target of the loss.
        """
        for given, index in zip(self._inputs, self._input_calls, strict=True):
            if given.shape != target.shape or given.shape[-1] < 3:
                continue
            if torch.equal(given[..., 1:], target[..., :-1]):
                return index
        return -1

    def record_call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Record one torch call while recording is on.

        In-place changes of parameters, buffers and gradients are recorded even if recording is off.

        Args:
            func: Function that was called.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            result: Return value of the call.
        """
        if self._is_busy:
            return
        name = get_function_name(func)
        changes = _is_in_place(name)
        if name == "grad" and getattr(func, "__name__", "") == "__set__" and args[1] is not None:
            self._note_gradient_write()
        if not (self.is_on or changes):
            return
        self._is_busy = True
        try:
            if changes:  # functions of torch.nn.init pass their tensor as a keyword argument
                self._note_write(args[0] if args else kwargs.get("tensor"), name)
            if self.is_on and len(self._calls) < _MOST_CALLS:
                self._note_call(name, args, kwargs, args[0] if name == "__setitem__" else result)
        finally:
            self._is_busy = False

    def take_written(self) -> dict[str, Any]:
        """Return the script lines that changed tensors in this update, for the update's record, and forget them."""
        found = {
            "written": self.written,
            "written_outside": self.written_outside,
            "gradient_lines": self.gradient_lines,
        }
        self.written, self.written_outside, self.gradient_lines = {}, {}, {}
        self._num_losses = 0
        return found

    def _note_write(self, target: Any, func: str) -> None:
        """Record that the script changes a tensor in place: a tensor of any known model, or a gradient.

        Args:
            target: Tensor, or list of tensors.
            func: Name of the function that changes it.
        """
        for each in target if isinstance(target, list | tuple) else (target,):
            if not isinstance(each, torch.Tensor):
                continue
            name = self._find_name(_get_local(each))
            outside = "" if name else self.places.outside.get(get_address(_get_local(each)), "")
            if name or outside:
                frame = find_script_frame()
                if frame is not None:
                    lines = (self.written if name else self.written_outside).setdefault(name or outside, [])
                    line = str(Frame.from_frame(frame))
                    if line not in lines:
                        lines.append(line)
            elif "zero" not in func and self._num_losses and self._is_gradient(each):
                self._note_gradient_write()
                return

    def _is_gradient(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor shares memory with a parameter's gradient."""
        if self._gradients is None:
            self._gradients = self.places.list_gradients()
        return get_address(_get_local(tensor)) in self._gradients

    def _note_gradient_write(self) -> None:
        frame = find_gradient_frame()
        if frame is not None:
            counts = self.gradient_lines.setdefault(str(Frame.from_frame(frame)), [])
            if self._num_losses not in counts:
                counts.append(self._num_losses)

    def _find_name(self, tensor: Any) -> str:
        """Return the name of a prepared model's parameter or buffer that shares memory with a tensor, or ""."""
        if not isinstance(tensor, torch.Tensor) or is_dtensor(tensor):
            return ""
        if not self._names:
            self.learn_names()
        return self._names.get(id(tensor)) or self._storages.get(get_address(tensor), "")

    def learn_names(self) -> None:
        """Update the names of parameters and buffers. Must be called after models are prepared or replaced."""
        self._names, self._storages = self._list_names()
        self._modules = self.places.list_modules()

    def _note_call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        outputs = list(_list_tensors(result))[:3]
        if not outputs:
            return
        frame, module = self._find_place()
        if frame is None:
            return
        line = str(Frame.from_frame(frame))
        sources = [
            self._find_call(each, line, frame, module) for each in list(_list_tensors([list(args), kwargs]))[:12]
        ]
        entry: dict[str, Any] = {
            "line": line,
            "func": name,
            "module": type(module).__name__ if module is not None else "",
            "in": sources,
            **self._summarize_tensor(outputs[0]),
        }
        if not outputs[0].requires_grad and any(each.requires_grad for each in _list_tensors([list(args), kwargs])):
            entry["is_cut"] = True
        numbers = _list_numbers(args, kwargs)
        if numbers:
            entry["numbers"] = numbers
            is_scaled = name.strip("_") in _SCALINGS
            names = [_find_variable(frame, each) if is_scaled and isinstance(each, float) else "" for each in numbers]
            if any(names):
                entry["names"] = names
        words = {key: value for key, value in kwargs.items() if isinstance(value, str)}
        if words:
            entry["words"] = words
        if any(each in name for each in ("loss", "cross_entropy")):
            entry |= self._describe_loss(args, kwargs)
        if module is not None:
            part = self._find_name(getattr(module, "weight", None))
            if part:
                entry["part"] = part.rpartition(".")[0]
        self._calls.append(entry)
        for each in outputs:
            self._remember_line(each, line)

    def _describe_loss(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return entries that describe the call of a loss function, for the record of this call.

        They are "weighted" (whether class weights are passed), "counted" (the number of labels that are not ignored),
        "ignores" (whether a label is ignored), and "predicts".
        "predicts" is the index of the call that made a model input, if the target is this input shifted by one step.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        weight = kwargs.get("weight", args[2] if len(args) > 2 else None)
        entry: dict[str, Any] = {"weighted": isinstance(weight, torch.Tensor)}
        if isinstance(target, torch.Tensor) and not target.is_floating_point():
            entry["counted"] = int((target != kwargs.get("ignore_index", -100)).sum())
            entry["ignores"] = entry["counted"] < target.numel()
        elif isinstance(target, torch.Tensor):
            predicted = self._find_predicted(target)
            if predicted >= 0:
                entry["predicts"] = predicted
        return entry

    def _remember_line(self, tensor: torch.Tensor, line: str) -> None:
        """Record which line made a tensor, without keeping the tensor alive."""
        reference = weakref.ref(tensor)
        self._known[id(tensor)] = (reference, len(self._calls) - 1)
        if len(self._kept) < _MOST_KEPT:
            self._kept.append((self.update, line, reference))

    def list_alive(self, update: int) -> list[tuple[int, str, torch.Tensor]]:
        """Return the tensors of earlier updates that are still alive, as (update, script line that made it, tensor).

        Args:
            update: Number of the current update, whose tensors are left out.
        """
        self._kept = [each for each in self._kept if each[2]() is not None]
        found = ((number, line, reference()) for number, line, reference in self._kept)
        return [(number, line, each) for number, line, each in found if each is not None and number < update]

    def _find_call(
        self,
        tensor: torch.Tensor,
        line: str = "",
        frame: FrameType | None = None,
        module: torch.nn.Module | None = None,
    ) -> int:
        """Return the index of the call that made a tensor.

        A tensor that no recorded call has made is recorded as an input.

        Args:
            tensor: Tensor to look up.
            line: Line of the script that uses the tensor. With "", an unknown tensor is not recorded, and -1 is
                returned. Default: "".
            frame: Stack frame of this line, whose variables are searched for the tensor's name. Default: None, no
                variables are searched.
            module: Module that uses the tensor. Its parameters and buffers are searched for the tensor's name. Default:
                None, no module is searched.
        """
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        if not line:
            return -1
        name = self._find_name(tensor) or self._find_in_module(module, tensor)
        about: dict[str, Any] = {"line": line, "func": "input", "module": "", "in": []}
        if name:
            about["own"] = name
            # `compare.py` compares the values of parameters. Buffers are summarized, as they can differ between ranks.
            about |= {"shape": list(tensor.shape)} if tensor.requires_grad else self._summarize_tensor(tensor)
        else:
            about |= self._summarize_tensor(tensor)
            about["name"] = _find_tensor(frame, module, tensor)
        self._calls.append(about)
        self._known[id(tensor)] = (weakref.ref(tensor), len(self._calls) - 1)
        return len(self._calls) - 1

    def _find_in_module(self, module: torch.nn.Module | None, tensor: torch.Tensor) -> str:
        """Return the name of a parameter that a layout has replaced, or "" if the module has no such parameter.

        Such a parameter cannot be found by its address: while a module's forward runs, FSDP replaces shards by full
        parameters, and tensor parallelism uses DTensors.

        Args:
            module: Module whose forward runs.
            tensor: Tensor that the module uses.
        """
        if module is None or not isinstance(tensor, torch.nn.Parameter):
            return ""
        if not self._modules:
            self.learn_names()
        prefix = self._modules.get(id(module))
        if prefix is None:
            return ""
        name = next((name for name, each in module.named_parameters(recurse=False) if each is tensor), "")
        return f"{prefix}.{name}".lstrip(".") if name else ""

    def _find_place(self) -> tuple[FrameType | None, torch.nn.Module | None]:
        """Return the innermost stack frame of the script, and the innermost module whose forward is running.

        A torch call of a library belongs to the line of the script that called the library. The frame is None if an
        optimizer step, gradient clipping or Headway made the call, or if the script is not on the stack. The module is
        None if no forward is running.
        """
        module = None
        for depth, frame in enumerate(walk_stack()):
            code = frame.f_code
            file = code.co_filename
            if file == __file__ or file.endswith("headway/verify/draws.py"):
                continue
            if module is None and code.co_name == "forward":
                owner = frame.f_locals.get("self")
                module = owner if isinstance(owner, torch.nn.Module) else None
            if is_user_file(file):
                return frame, module
            if depth > _MOST_STACK or any(each in file for each in _STEPS):
                return None, None
            if is_headway_file(file) and code.co_name not in _OWN_CALLS:
                return None, None
        return None, None

    def _summarize_tensor(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Return a dict with the "shape" of a tensor, its "kind" of numbers, and three sums for each of its "rows".

        The three sums are the sum of the values, the sum of their absolute values, and the sum of the values weighted
        by position. The kind is "f" for floating-point numbers, "b" for bools, else "i". If a tensor has more than
        `_MOST_ROWS` rows, the rows of each sample are summed together if possible, else all rows. Sparse, quantized,
        nested, meta and sharded tensors get only their shape.
        """
        shape = list(tensor.shape)
        if is_dtensor(tensor) and all(each.is_replicate() for each in tensor.placements):
            tensor = _get_local(tensor)  # equal on all ranks
        if is_dtensor(tensor) or tensor.is_sparse or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
            return {"shape": shape}
        with torch.no_grad():
            plain = tensor.detach()
            if plain.is_complex():
                plain = torch.view_as_real(plain)
            groups = 1
            if plain.ndim and plain.numel():
                if 0 < shape[0] <= _MOST_ROWS:
                    groups = shape[0]
                elif self._rows and self._rows <= _MOST_ROWS and not shape[0] % self._rows:
                    groups = self._rows
            values = plain.reshape(groups, -1)
            stride = values.numel() // _MOST_SUMMED + 1
            if stride > 1:
                values = values[:, ::stride]
            values = torch.nan_to_num(values.to(torch.float64), nan=7.0, posinf=11.0, neginf=-11.0)
            places = torch.arange(values.shape[1], device=values.device, dtype=torch.float64).mul_(0.618).frac_()
            sums = torch.stack([values.sum(1), values.abs().sum(1), values @ places], 1)
            kind = "f" if tensor.is_floating_point() else "b" if tensor.dtype == torch.bool else "i"
            return {"shape": shape, "kind": kind, "rows": sums.tolist()}


class TensorPlaces:
    """Lookup that names modules, gradients, and models that were not passed to `prepare`. The base class knows none.

    Attributes:
        outside: Names of models that were not passed to `prepare`, by the address of each parameter.
    """

    def __init__(self) -> None:
        self.outside: dict[int, str] = {}

    def list_modules(self) -> dict[int, str]:
        """Return the name of each module of the prepared models, by its `id`."""
        return {}

    def list_gradients(self) -> dict[int, str]:
        """Return the name of each parameter with a gradient, by the address of this rank's part of the gradient."""
        return {}


def get_function_name(func: Any) -> str:
    """Return the name of a function that a torch function mode intercepts, or of the property that it gets or sets."""
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return name


def _is_in_place(name: str) -> bool:
    """Whether a function with this name changes the values of its first argument in place."""
    if name.endswith("__"):
        return name == "__setitem__" or name in _IN_PLACE
    return name.endswith("_") and name not in _KEEPS_VALUES


def _get_local(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a tensor that may be sharded."""
    plain: torch.Tensor = tensor
    if is_dtensor(tensor):
        with torch.no_grad():
            plain = tensor.to_local()
    return plain


def get_address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory, or -1 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return -1


def _list_tensors(tree: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple) and depth < 4:
        for each in tree:
            yield from _list_tensors(each, depth + 1)
    elif isinstance(tree, dict) and depth < 4:
        for each in tree.values():
            yield from _list_tensors(each, depth + 1)


def _list_numbers(args: Sequence[Any], kwargs: dict[str, Any]) -> list[float]:
    """Return the numbers among the arguments of a call, at most six."""
    values = [*args, *kwargs.values()]
    return [each for each in values if isinstance(each, int | float) and not isinstance(each, bool)][:6]


def find_script_frame() -> FrameType | None:
    """Return the innermost stack frame of the script, even if it has called a library that makes the torch call.

    Return None if an optimizer step, gradient clipping or Headway made the call, or if the script is not on the stack.
    """
    for depth, frame in enumerate(walk_stack()):
        file = frame.f_code.co_filename
        if "headway/verify/" in file:
            continue
        if is_user_file(file):
            return frame
        if depth > _MOST_STACK or is_headway_file(file) or any(each in file for each in _STEPS):
            if frame.f_code.co_name in _OWN_CALLS:
                continue
            return None
    return None


def find_gradient_frame() -> FrameType | None:
    """Return the innermost stack frame of the script, even if it has called a torch function like `clip_grad_norm_`.

    Return None if an optimizer or Headway made the torch call, or if the script is not on the stack.
    """
    for depth, frame in enumerate(walk_stack()):
        file = frame.f_code.co_filename
        if "headway/verify/" in file:
            continue
        if is_user_file(file):
            return frame
        if depth > _MOST_STACK or is_headway_file(file) or "torch/optim/" in file:
            return None
    return None


def find_line() -> str:
    """Return the innermost line of the script on the stack, or "" if there is none."""
    for frame in walk_stack():
        if is_user_file(frame.f_code.co_filename):
            return str(Frame.from_frame(frame))
    return ""


def _find_variable(frame: FrameType, value: Any) -> str:
    """Return the script's expression for a number, such as "means['size']" or "self.mean"; "" if there is none.

    Args:
        frame: Frame whose variables are searched.
        value: Number to look for.
    """
    for name, each in _list_variables(frame):
        if each is value:
            return name
    return ""


def _find_tensor(frame: FrameType | None, module: torch.nn.Module | None, tensor: torch.Tensor) -> str:
    """Return an expression for a tensor that no recorded call has made, such as "weight of a Linear", or "".

    Args:
        frame: Frame whose variables are searched.
        module: Module whose tensors are searched.
        tensor: Tensor to look for.
    """
    if module is not None:
        for name, each in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if each is tensor:
                return f"{name} of a {type(module).__name__}"
    if frame is not None:
        for name, found in _list_variables(frame):
            if found is tensor:
                return name
    return ""


def _list_variables(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yield pairs of (expression, value) for the variables of a frame, and for their items and attributes."""
    spaces = [frame.f_locals] if frame.f_locals is frame.f_globals else [frame.f_locals, frame.f_globals]
    for space in spaces:
        own = [(name, value) for name, value in list(space.items())[:400] if not name.startswith("__")]
        yield from own
        for name, value in own:
            if isinstance(value, dict):
                yield from ((f"{name}[{key!r}]", each) for key, each in list(value.items())[:50])
            elif isinstance(value, list | tuple):
                yield from ((f"{name}[{index}]", each) for index, each in enumerate(value[:50]))
            elif not inspect.ismodule(value) and not isinstance(value, type):
                inner = getattr(value, "__dict__", None)
                if isinstance(inner, dict):
                    yield from ((f"{name}.{key}", each) for key, each in list(inner.items())[:100])
