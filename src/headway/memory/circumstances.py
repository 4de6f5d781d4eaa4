"""What decides how large a batch may be: the function, its arguments, the device; and the model and shapes seen in an attempt."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from headway.memory.attempt import is_several
from headway.runtime import process
from headway.runtime.device import detect


def before(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], key: Any) -> dict[str, Any]:
    """What is known before the first attempt.

    Args:
        function: the user's function; variables of enclosing functions that it uses count like arguments.
        args: without the batch size.
        kwargs: likewise.
        key: whatever else the user says that the size depends on.
    """
    cells = getattr(function, "__closure__", None) or ()
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    hardware = process.current().hardware if process.is_started() else detect()
    return {
        "function": f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}",
        "arguments": [_describe(each) for each in args] + [f"{k}={_describe(v)}" for k, v in sorted(kwargs.items())],
        # Not the contents of lists and the like: what a function collects in them changes from call to call.
        "variables": [f"{name}={_content(cell)}" for name, cell in zip(names, cells)],
        "device": _device_name(hardware.kind),
        "is_several": is_several(),
        "torch": torch.__version__,
        "key": str(key),
    }


def _device_name(kind: str) -> str:
    if kind != "cuda":
        return kind
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{properties.name}, {properties.total_memory >> 20} MiB"


def _content(cell: Any) -> str:
    try:
        value = cell.cell_contents
    except ValueError:  # not assigned yet
        return "unset"
    return type(value).__name__ if isinstance(value, list | tuple | dict) else _describe(value)


def _describe(value: Any) -> str:
    """Shapes and sizes of what takes memory, values of plain settings, the type of anything else."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}"
    if isinstance(value, torch.nn.Module):
        return _model(value)
    if isinstance(value, bool | int | float | str | None):
        return repr(value)
    if isinstance(value, list | tuple) and len(value) <= 64:
        return "[" + ", ".join(map(_describe, value)) + "]"
    if isinstance(value, dict) and len(value) <= 64:
        return "{" + ", ".join(f"{key}: {_describe(each)}" for key, each in value.items()) + "}"
    if isinstance(value, torch.utils.data.DataLoader):
        return f"{type(value).__name__} of {type(value.dataset).__name__}"
    return type(value).__name__


def _model(model: torch.nn.Module) -> str:
    kinds = sorted({str(parameter.dtype) for parameter in model.parameters()})
    sizes = [parameter.numel() for parameter in model.parameters()]
    return f"{type(model).__name__}: {sum(sizes)} parameters of {', '.join(kinds)} in {len(sizes)} tensors"


@contextmanager
def observing(seen: dict[str, str]) -> Iterator[None]:
    """Note the first model that is called in the block, and the shapes (without their first dimension) that go in."""

    def note(module: torch.nn.Module, args: Any) -> None:
        if not seen:
            seen["model"] = _model(module)
        shapes = [f"{each.dtype}{tuple(each.shape[1:])}" for each in args if isinstance(each, torch.Tensor)]
        # A model called by keyword shows no shapes; the first of its parts that is called by position does.
        if shapes:
            seen["inputs"] = ", ".join(shapes)
            handle.remove()

    handle = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()
