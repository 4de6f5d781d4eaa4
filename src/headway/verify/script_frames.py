"""Find the line of the script that makes a torch call, and the names of the script's variables.

This module reads frames of the user's code and their variables. That is acceptable because `headway verify` is a
diagnostic tool: the records only name a line or a variable for the reader. No value of the script is changed.
"""

import inspect
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from headway.common.callsite import Frame, is_headway_file, is_user_file, walk_stack

_MOST_FRAMES = 120
"""Largest number of stack frames that are searched for a line of the script."""
_OWN_CALLS = ("forward", "__call__", "run", "run_forward")
"""Names of Headway functions that can be on the stack between the script and a torch call of the script's model."""
_STEP_FILES = ("torch/optim/", "torch/nn/utils/clip_grad")
"""Parts of the paths of torch's source files whose torch calls belong to the optimizer step."""
_VERIFY_FILES = "headway/verify/"


def find_line() -> str:
    """Return the innermost line of the script on the stack, or "" if there is none."""
    for frame in walk_stack():
        if is_user_file(frame.f_code.co_filename):
            return str(Frame.from_frame(frame))
    return ""


def find_call_frame() -> tuple[FrameType | None, torch.nn.Module | None]:
    """Return the innermost stack frame of the script, and the innermost module whose forward is running.

    A torch call of a library belongs to the line of the script that called the library. The frame is None if an
    optimizer step, gradient clipping or Headway made the call, or if the script is not on the stack. The module is None
    if no forward is running, or if the frame is None.
    """
    module = None
    for depth, frame in enumerate(walk_stack()):
        file = frame.f_code.co_filename
        if _VERIFY_FILES in file:
            continue
        if module is None and frame.f_code.co_name == "forward":
            owner = frame.f_locals.get("self")
            module = owner if isinstance(owner, torch.nn.Module) else None
        if is_user_file(file):
            return frame, module
        is_step = any(each in file for each in _STEP_FILES)
        is_headway_call = is_headway_file(file) and frame.f_code.co_name not in _OWN_CALLS
        if depth > _MOST_FRAMES or is_step or is_headway_call:
            return None, None
    return None, None


def find_gradient_frame() -> FrameType | None:
    """Return the innermost stack frame of the script, even if it has called a torch function like `clip_grad_norm_`.

    Return None if an optimizer or Headway made the torch call, or if the script is not on the stack.
    """
    for depth, frame in enumerate(walk_stack()):
        file = frame.f_code.co_filename
        if _VERIFY_FILES in file:
            continue
        if is_user_file(file):
            return frame
        if depth > _MOST_FRAMES or is_headway_file(file) or "torch/optim/" in file:
            return None
    return None


def describe_number(frame: FrameType, number: float) -> str:
    """Return the script's expression for a number, such as "means['size']" or "self.mean"; "" if there is none.

    Args:
        frame: Frame whose variables are searched.
        number: Number to look for. It is recognized by its identity, because equal numbers are common.
    """
    for expression, value in _list_variables(frame):
        if value is number:
            return expression
    return ""


def describe_tensor(frame: FrameType | None, module: torch.nn.Module | None, tensor: torch.Tensor) -> str:
    """Return a name for a tensor, such as "weight of a Linear" or "keeper.rows"; "" if the tensor is not found.

    The module is searched first, then the frame's variables with their items and attributes.

    Args:
        frame: Frame whose variables are searched, or None.
        module: Module whose own parameters and buffers are searched, or None.
        tensor: Tensor to look for.
    """
    if module is not None:
        for name, each in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if each is tensor:
                return f"{name} of a {type(module).__name__}"
    if frame is not None:
        for expression, value in _list_variables(frame):
            if value is tensor:
                return expression
    return ""


def _list_variables(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yield pairs of (expression, value) for the variables of a frame, and for their items and attributes.

    Large namespaces and containers are searched only in part, because this runs for many torch calls.
    """
    namespaces = [frame.f_locals]
    if frame.f_globals is not frame.f_locals:  # they are one dict at the top level of a module
        namespaces.append(frame.f_globals)
    for namespace in namespaces:
        variables = [(name, value) for name, value in list(namespace.items())[:400] if not name.startswith("__")]
        yield from variables
        for name, value in variables:
            yield from _list_members(name, value)


def _list_members(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield pairs of (expression, value) for the items of a container, or for the attributes of an object.

    Modules and classes are left out.

    Args:
        name: Name of the variable that holds the value.
        value: Container or other object.
    """
    if isinstance(value, dict):
        for key, item in list(value.items())[:50]:
            yield f"{name}[{key!r}]", item
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value[:50]):
            yield f"{name}[{index}]", item
    elif not inspect.ismodule(value) and not isinstance(value, type):
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            for key, attribute in list(attributes.items())[:100]:
                yield f"{name}.{key}", attribute
