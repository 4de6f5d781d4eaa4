"""`CallTrace`: records the torch calls behind each loss, and the line of the script that makes each call.

If two runs differ, `blame.py` and `part_blame.py` compare these records and find the first call whose result differs.
Only a summary of each result is recorded: three sums for each row.
"""

import json
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from headway.common.callsite import Frame
from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from headway.core.weights.pieces import is_dtensor
from headway.verify.record_types import MOST_SUMMED, CallEntry, LossEntry, UpdateRecord
from headway.verify.script_frames import (
    describe_number,
    describe_tensor,
    find_call_frame,
    find_gradient_frame,
    find_line,
)
from headway.verify.sharded_tensors import get_address

_MOST_COMPARED = 1 << 20
"""Largest number of values of a model input that is compared with the targets of losses."""
_MOST_CALLS = 2000
"""Largest number of calls that are recorded for one loss."""
_MOST_ROWS = 128
"""Largest number of rows that are summarized one by one."""
_MOST_RESULTS = 20_000
"""Largest number of results that are watched in order to find those that stay alive."""

_GOLDEN_RATIO = (5**0.5 - 1) / 2
"""Irrational factor: the fractional parts of its multiples do not repeat."""

_SCALINGS = frozenset(
    ("mul", "rmul", "div", "truediv", "rtruediv", "true_divide", "add", "radd", "sub", "rsub", "pow", "rpow")
)
"""Functions whose number arguments are looked up among the script's variables, so that a report can name them."""
_IN_PLACE = frozenset(
    ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__ipow__", "__iand__", "__ior__")
)
"""Operator methods that change their first argument in place."""
_KEEPS_VALUES = frozenset(("requires_grad_", "detach_", "share_memory_"))
"""Functions whose names end with "_" although they do not change the values of their first argument."""


class ModelNames:
    """Lookup of the names of a run's models and their tensors. This base class knows no models.

    Attributes:
        unprepared_models: Description of each model that was not passed to `prepare`, by the memory address of each of
            its parameters.
    """

    def __init__(self) -> None:
        self.unprepared_models: dict[int, str] = {}

    def map_tensors(self) -> tuple[dict[int, str], dict[int, str]]:
        """Return two dicts with the names of the prepared models' parameters and buffers.

        The keys are the tensor's `id` in the first dict, and its memory address in the second.
        """
        return {}, {}

    def map_modules(self) -> dict[int, str]:
        """Return the name of each module of the prepared models, by its `id`."""
        return {}

    def map_gradients(self) -> dict[int, str]:
        """Return the name of each parameter with a gradient, by the memory address of the gradient (local shard)."""
        return {}


class _Result(NamedTuple):
    """Result of a torch call that was recorded.

    Attributes:
        update: Number of the update in which the call was made.
        line: Line of the script that made the call.
        reference: Weak reference to the tensor.
    """

    update: int
    line: str
    reference: "weakref.ref[torch.Tensor]"


class CallTrace:
    """Recorder of the torch calls in one process.

    Args:
        path: File to which records are appended, one JSON line per loss.
        names: Names of the run's models. Default: None, no names are known.
        is_enabled: Whether calls may be recorded. A run that measures memory must not keep summaries of tensors.
            Default: True.

    Attributes:
        names: Names of the run's models.
        is_recording: Whether calls are currently recorded.
        update: Number of the update that is being computed.
        write_lines: Lines of the script that changed a parameter or buffer in place in this update, by the tensor's
            name.
        unprepared_write_lines: Lines of the script that changed a model that was not passed to `prepare`, by a
            description of the model.
        gradient_lines: For each line of the script that changed gradients in this update, how many backward passes of
            the update had run before each change.
    """

    def __init__(self, path: Path, names: ModelNames | None = None, *, is_enabled: bool = True) -> None:
        self._path = path
        self._is_enabled = is_enabled
        self.names = names or ModelNames()
        self._names_by_id: dict[int, str] = {}
        self._names_by_address: dict[int, str] = {}
        self._module_names: dict[int, str] = {}
        self._gradient_names: dict[int, str] | None = None
        self._num_losses = 0
        self._num_rows: int | None = None
        self._calls: list[CallEntry] = []
        # Index of the call that made each tensor, by the tensor's `id`. The weak reference shows whether the `id` still
        # belongs to the same tensor.
        self._call_by_tensor: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._results: list[_Result] = []
        self._model_inputs: list[tuple[torch.Tensor, int]] = []
        self._is_in_call = False
        self.is_recording = False
        self.update = 1
        self.write_lines: dict[str, list[str]] = {}
        self.unprepared_write_lines: dict[str, list[str]] = {}
        self.gradient_lines: dict[str, list[int]] = {}

    # ---------------------------------------------------------------- phases

    def begin_batch(self, num_rows: int | None) -> None:
        """Start to record the calls of a new batch, and discard recorded calls that no loss has used.

        Args:
            num_rows: Number of rows of the batch in this process, or None if it is unknown.
        """
        self._calls, self._call_by_tensor, self._num_rows = [], {}, num_rows
        self.is_recording = self._is_enabled

    def pause_recording(self) -> None:
        """Stop recording calls until `begin_batch` or `resume_recording` is called."""
        self.is_recording = False

    def resume_recording(self) -> None:
        """Record calls again, unless recording is disabled (`is_enabled`)."""
        self.is_recording = self._is_enabled

    def write_loss(self, loss: torch.Tensor, weight: float | None, reduction: str) -> None:
        """Write a record of the calls behind a loss to the trace file, discard the calls, and stop recording.

        Args:
            loss: Loss whose backward pass is about to run.
            weight: Loss weight that the script passed, or None.
            reduction: "mean" or "sum", as the script passed it.
        """
        self.is_recording = False
        self._gradient_names = None  # backward creates new gradients
        self._num_losses += 1
        entry = LossEntry(
            update=self.update,
            loss_call=self._get_call(loss),
            value=float(loss.detach().float().mean()),
            weight=weight,
            reduction=reduction,
            line=find_line(),
            calls=self._calls,
        )
        with self._path.open("a") as file:
            file.write(entry.to_json() + "\n")
        self._calls, self._call_by_tensor, self._model_inputs = [], {}, []

    def void_last_loss(self) -> None:
        """Mark the last recorded loss as void, because its backward pass failed. It is then not part of the update."""
        with self._path.open("a") as file:
            file.write(json.dumps({"update": self.update, "is_void": True}) + "\n")

    # ---------------------------------------------------------------- calls

    def record_call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Record one torch call while recording is on.

        In-place changes of parameters, buffers and gradients are recorded even if recording is off. Torch calls that
        this method itself makes are ignored.

        Args:
            func: Function that was called.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            result: Return value of the call.
        """
        if self._is_in_call:
            return
        name = get_function_name(func)
        is_in_place = _is_in_place(name)
        if name == "grad" and getattr(func, "__name__", "") == "__set__" and args[1] is not None:
            self._record_gradient_change()
        if not (self.is_recording or is_in_place):
            return
        self._is_in_call = True
        try:
            if is_in_place:  # functions of torch.nn.init pass their tensor as a keyword argument
                self._record_change(args[0] if args else kwargs.get("tensor"), name)
            if self.is_recording and len(self._calls) < _MOST_CALLS:
                self._add_call(name, args, kwargs, args[0] if name == "__setitem__" else result)
        finally:
            self._is_in_call = False

    def _add_call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Append an entry for a call to the calls of the current loss, if the script is on the stack.

        Only the first three results and the first twelve tensor arguments are examined.

        Args:
            name: Name of the function.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            result: Return value of the call, or the tensor that it has changed.
        """
        outputs = list(_list_tensors(result))[:3]
        frame, module = find_call_frame() if outputs else (None, None)
        if frame is None:
            return
        line = str(Frame.from_frame(frame))
        inputs = list(_list_tensors([list(args), kwargs]))
        weight_name = "" if module is None else self._find_name(getattr(module, "weight", None))
        numbers = _list_numbers(args, kwargs)
        entry = CallEntry(
            line=line,
            func=name,
            inputs=[self._get_or_add_call(each, line, frame, module) for each in inputs[:12]],
            shape=_list_sizes(outputs[0]),
            is_cut=not outputs[0].requires_grad and any(each.requires_grad for each in inputs),
            numbers=numbers,
            number_names=_name_numbers(name, numbers, frame),
            strings={key: value for key, value in kwargs.items() if isinstance(value, str)},
            module_name=weight_name.rpartition(".")[0],
        )
        self._add_row_sums(entry, outputs[0])
        if "loss" in name or "cross_entropy" in name:
            self._add_loss_fields(entry, args, kwargs)
        self._calls.append(entry)
        for output in outputs:
            reference = weakref.ref(output)
            self._call_by_tensor[id(output)] = (reference, len(self._calls) - 1)
            if len(self._results) < _MOST_RESULTS:
                self._results.append(_Result(self.update, line, reference))

    def _add_loss_fields(self, entry: CallEntry, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Set those fields of the record of a call that only loss functions have.

        They are `has_class_weights`, `num_labels`, `ignores_labels` and `predicted_input`.

        Args:
            entry: Record of a call of a loss function, which is changed.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        weight = kwargs.get("weight", args[2] if len(args) > 2 else None)
        entry.has_class_weights = isinstance(weight, torch.Tensor)
        if isinstance(target, torch.Tensor) and not target.is_floating_point():
            entry.num_labels = int((target != kwargs.get("ignore_index", -100)).sum())
            entry.ignores_labels = entry.num_labels < target.numel()
        elif isinstance(target, torch.Tensor):
            entry.predicted_input = self._find_predicted_input(target)

    def store_inputs(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Store a model's inputs, in order to recognize a loss whose target is an input shifted by one step.

        Only floating-point inputs with at least two dimensions are stored, and only in the first update.

        Args:
            args: Positional arguments of the model.
            kwargs: Keyword arguments of the model.
        """
        if self.update == 1 and self.is_recording:
            tensors = [each for each in _list_tensors([list(args), kwargs]) if each.is_floating_point()]
            tensors = [each for each in tensors if each.ndim > 1][:4]
            self._model_inputs = [
                (each.detach(), self._get_call(each)) for each in tensors if each.numel() <= _MOST_COMPARED
            ]

    def _find_predicted_input(self, target: torch.Tensor) -> int | None:
        """Find the model input that equals a loss's target if the input is shifted by one step in the last dimension.

        Return the index of the torch call that made this input. None if there is no such input, or no recorded call
        made it.

        Args:
            target: Target of the loss.
        """
        for tensor, index in self._model_inputs:
            if tensor.shape != target.shape or tensor.shape[-1] < 3:
                continue
            if torch.equal(tensor[..., 1:], target[..., :-1]):
                return index if index >= 0 else None
        return None

    def list_alive_results(self, update: int) -> list[tuple[int, str, torch.Tensor]]:
        """Return the results of earlier updates that are still alive, as (update, script line that made it, tensor).

        Args:
            update: Number of the current update, whose results are left out.
        """
        self._results = [each for each in self._results if each.reference() is not None]
        tensors = ((each, each.reference()) for each in self._results if each.update < update)
        return [(each.update, each.line, tensor) for each, tensor in tensors if tensor is not None]

    def _get_call(self, tensor: torch.Tensor) -> int:
        """Return the index of the recorded call that made a tensor, or -1 if no recorded call made it."""
        reference, index = self._call_by_tensor.get(id(tensor), (None, -1))
        return index if reference is not None and reference() is tensor else -1

    def _get_or_add_call(
        self, tensor: torch.Tensor, line: str, frame: FrameType, module: torch.nn.Module | None
    ) -> int:
        """Return the index of the call that made a tensor. If no recorded call made it, record it as an input.

        Args:
            tensor: Argument of a call.
            line: Line of the script that uses the tensor.
            frame: Stack frame of this line, whose variables are searched for the tensor's name.
            module: Module that uses the tensor, whose parameters and buffers are searched for its name, or None.
        """
        index = self._get_call(tensor)
        if index >= 0:
            return index
        entry = CallEntry(line=line, func="input", shape=_list_sizes(tensor))
        entry.model_tensor = self._find_name(tensor) or self._find_replaced_parameter(module, tensor)
        if not entry.model_tensor:
            entry.variable = describe_tensor(frame, module, tensor)
        # Buffers are summarized, because they can differ between ranks. `compare.py` compares the values of parameters.
        is_parameter = bool(entry.model_tensor) and tensor.requires_grad
        if not is_parameter:
            self._add_row_sums(entry, tensor)
        self._calls.append(entry)
        self._call_by_tensor[id(tensor)] = (weakref.ref(tensor), len(self._calls) - 1)
        return len(self._calls) - 1

    # ---------------------------------------------------------------- names

    def update_names(self) -> None:
        """Update the names of parameters and buffers. Must be called after models are prepared or replaced."""
        self._names_by_id, self._names_by_address = self.names.map_tensors()
        self._module_names = self.names.map_modules()

    def _find_name(self, tensor: Any) -> str:
        """Return the name of a prepared model's parameter or buffer that shares memory with a tensor, or ""."""
        if not isinstance(tensor, torch.Tensor) or is_dtensor(tensor):
            return ""
        if not self._names_by_id:
            self.update_names()
        return self._names_by_id.get(id(tensor)) or self._names_by_address.get(get_address(tensor), "")

    def _find_replaced_parameter(self, module: torch.nn.Module | None, tensor: torch.Tensor) -> str:
        """Return the name of a parameter that a layout has replaced, or "" if the module has no such parameter.

        Such a parameter cannot be found by its address: while a module's forward runs, FSDP replaces shards by full
        parameters, and tensor parallelism uses DTensors.

        Args:
            module: Module whose forward runs, or None.
            tensor: Tensor that the module uses.
        """
        if module is None or not isinstance(tensor, torch.nn.Parameter):
            return ""
        if not self._module_names:
            self.update_names()
        module_name = self._module_names.get(id(module))
        if module_name is None:
            return ""
        name = next((name for name, each in module.named_parameters(recurse=False) if each is tensor), "")
        return f"{module_name}.{name}".lstrip(".") if name else ""

    # ---------------------------------------------------------------- in-place changes

    def move_lines(self, update: UpdateRecord) -> None:
        """Move the script lines that changed tensors in this update into the record of the update."""
        update.write_lines, self.write_lines = self.write_lines, {}
        update.unprepared_write_lines, self.unprepared_write_lines = self.unprepared_write_lines, {}
        update.gradient_lines, self.gradient_lines = self.gradient_lines, {}
        self._num_losses = 0

    def _record_change(self, target: Any, func: str) -> None:
        """Record that the script changes a tensor in place: a tensor of any known model, or a gradient.

        A change of a gradient is recorded only after a backward pass of the update, and not if it sets zeros.

        Args:
            target: Tensor, or list of tensors.
            func: Name of the function that changes it.
        """
        for tensor in target if isinstance(target, list | tuple) else (target,):
            if not isinstance(tensor, torch.Tensor):
                continue
            name = self._find_name(get_local_shard(tensor))
            model = self.names.unprepared_models.get(get_address(tensor), "")
            if name:
                _add_line(self.write_lines, name)
            elif model:
                _add_line(self.unprepared_write_lines, model)
            elif "zero" not in func and self._num_losses and self._is_gradient(tensor):
                self._record_gradient_change()
                return  # one record for a list of gradients

    def _is_gradient(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor shares memory with a parameter's gradient."""
        if self._gradient_names is None:
            self._gradient_names = self.names.map_gradients()
        return get_address(tensor) in self._gradient_names

    def _record_gradient_change(self) -> None:
        """Record the script line that changes a gradient, and how many backward passes of the update have run before."""
        frame = find_gradient_frame()
        if frame is not None:
            counts = self.gradient_lines.setdefault(str(Frame.from_frame(frame)), [])
            if self._num_losses not in counts:
                counts.append(self._num_losses)

    # ---------------------------------------------------------------- summaries

    def _add_row_sums(self, entry: CallEntry, tensor: torch.Tensor) -> None:
        """Set `row_sums` and `is_sampled` in the record of a call, unless the tensor's values cannot be summed.

        `row_sums` has the shape [groups, 3]: the sum of the values, the sum of their absolute values, and their sum
        weighted by position. A group is an entry of the first dimension (a row). If there are more than `_MOST_ROWS`
        rows, a group consists of the rows of one sample if they divide evenly, else of the whole tensor. In groups of
        more than `MOST_SUMMED` values, only values at regular intervals are summed, and `is_sampled` is True. Sparse,
        quantized, nested, meta and sharded tensors have no sums.

        Args:
            entry: Record of the call, which is changed.
            tensor: Result of the call, or the input that the record describes.
        """
        num_rows = entry.shape[0] if entry.shape else 0
        if is_dtensor(tensor) and all(each.is_replicate() for each in tensor.placements):
            tensor = get_local_shard(tensor)  # equal on all ranks
        if is_dtensor(tensor) or tensor.is_sparse or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
            return
        with torch.no_grad():
            plain = tensor.detach()
            if plain.is_complex():
                plain = torch.view_as_real(plain.resolve_conj())
            num_groups = 1
            if num_rows and plain.numel():
                if num_rows <= _MOST_ROWS:
                    num_groups = num_rows
                elif self._num_rows and self._num_rows <= _MOST_ROWS and not num_rows % self._num_rows:
                    num_groups = self._num_rows
            values = plain.reshape(num_groups, -1)
            stride = -(-values.shape[1] // MOST_SUMMED)
            if stride > 1:
                values = values[:, ::stride]
            # Values that are not finite get arbitrary numbers, so that they can be compared and written as JSON.
            values = torch.nan_to_num(values.to(torch.float64), nan=7.0, posinf=11.0, neginf=-11.0)
            # No weight of a position repeats, so that exchanged values change the sum.
            positions = torch.arange(values.shape[1], device=values.device, dtype=torch.float64)
            weights = positions.mul_(_GOLDEN_RATIO).frac_()
            sums = torch.stack([values.sum(1), values.abs().sum(1), values @ weights], 1)
            entry.row_sums = sums.tolist()
            entry.is_sampled = stride > 1


def _add_line(lines: dict[str, list[str]], name: str) -> None:
    """Add the line of the script that makes the current torch call to the lines of a tensor or model.

    Args:
        lines: Lines by the name of the tensor or model.
        name: Name of the tensor or model.
    """
    frame, _ = find_call_frame()
    line = "" if frame is None else str(Frame.from_frame(frame))
    if line and line not in lines.setdefault(name, []):
        lines[name].append(line)


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


def _list_tensors(tree: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and dicts, which are searched to a depth of four.

    Args:
        tree: Tensor or container. Other values are ignored.
        depth: Number of containers around `tree`. Default: 0.
    """
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


def _list_sizes(tensor: torch.Tensor) -> list[int]:
    """Return the shape of a tensor; for a nested tensor, whose other sizes vary, only its number of items."""
    return [tensor.size(0)] if tensor.is_nested else list(tensor.shape)


def _name_numbers(func: str, numbers: list[float], frame: FrameType) -> list[str]:
    """Return the script's expression for each number argument of a call, such as the name of a variable.

    The expression is "" for an integer, and for a float whose expression is unknown. The list is empty if all
    expressions are "", or if the function is not in `_SCALINGS`, the functions for which expressions are recorded.

    Args:
        func: Name of the function. Underscores at its start and end are ignored, as in `mul_`.
        numbers: Number arguments of the call.
        frame: Frame of the script that makes the call. Its variables are searched for the numbers.
    """
    if func.strip("_") not in _SCALINGS:
        return []
    # Integers occur in too many variables to be attributed to one of them.
    names = [describe_number(frame, each) if isinstance(each, float) else "" for each in numbers]
    return names if any(names) else []
