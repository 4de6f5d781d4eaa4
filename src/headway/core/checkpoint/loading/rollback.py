"""Undo the changes of a failed load: undo steps, and copies of the state that objects had before.

Changes are undone in reverse order, and each undo step runs even if another fails.
"""

from collections.abc import Callable
from typing import Any

import numpy
import torch

from headway.core.checkpoint.format.dense import is_dense
from headway.core.checkpoint.format.strides import get_saved_stride, set_stride
from headway.core.checkpoint.format.values import encode_value, map_items
from headway.core.weights.pieces import get_local_part, is_dtensor
from headway.core.weights.tensor_bytes import is_bit_identical, view_as_bits
from headway.errors import CheckpointError


class LoadRollback:
    """List of steps that undo the changes that a load has made so far."""

    def __init__(self) -> None:
        self._steps: list[tuple[str, Callable[[], Any]]] = []

    def add(self, name: str, undo_step: Callable[[], Any]) -> None:
        """Add an undo step. Call this method before the change is made.

        Args:
            name: Name of the object that will be changed, for messages.
            undo_step: Function that undoes the change.
        """
        self._steps.append((name, undo_step))

    def run(self) -> list[str]:
        """Run all undo steps in reverse order, and return one message for each step that failed."""
        problems = []
        while self._steps:
            name, undo_step = self._steps.pop()
            try:
                undo_step()
            except Exception as error:  # the other steps must run too
                problems.append(f"{name} ({type(error).__name__}: {error})")
        return problems


def copy_state(state: Any) -> Callable[[], Any]:
    """Copy a state, and return a function that rebuilds it. Later changes to the original do not affect the copy.

    Dense tensors are copied to host memory. DTensors are copied on their device. Sparse, quantized and meta tensors,
    and objects of unknown types, are kept without a copy.
    """
    copy = _copy_value(state)
    return lambda: _rebuild_value(copy)


def restore_object(obj: Any, rebuild_state: Callable[[], Any]) -> None:
    """Load the state that an object had before a failed load.

    Args:
        obj: Object with `state_dict` and `load_state_dict`.
        rebuild_state: Function that returns the former state, as `copy_state` returned it.

    Raises:
        Exception: The error of `load_state_dict`, unless the object still has its former state.
    """
    try:
        obj.load_state_dict(rebuild_state())
    except Exception:
        # An object that refuses every state has most likely changed nothing.
        if not is_same_state(obj.state_dict(), rebuild_state()):
            raise


def is_same_state(one: Any, other: Any) -> bool:
    """Whether two states have bit-identical values. False if a state contains a value that a checkpoint cannot hold."""
    own_tensors: dict[str, torch.Tensor] = {}
    other_tensors: dict[str, torch.Tensor] = {}
    try:
        if encode_value(one, "", own_tensors) != encode_value(other, "", other_tensors):
            return False
    except CheckpointError:
        return False
    return all(
        is_bit_identical(get_local_part(tensor), get_local_part(other_tensors[name]))
        for name, tensor in own_tensors.items()
    )


def _copy_value(value: Any) -> Any:
    """Return a copy of a state value that later changes of the original do not affect.

    Dense tensors become `_TensorCopy` objects. Containers are copied recursively. Objects of other types, and tensors that
    are sparse, quantized or without memory, are returned unchanged.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        if is_dtensor(value):
            return value.detach().clone()
        return _TensorCopy(value) if is_dense(value) and not value.is_meta else value
    if isinstance(value, numpy.ndarray):
        return value.copy()
    return map_items(_copy_value, value)


def _rebuild_value(value: Any) -> Any:
    """Return the state value that `_copy_value` has copied."""
    return value.rebuild() if isinstance(value, _TensorCopy) else map_items(_rebuild_value, value)


class _TensorCopy:
    """Copy of a dense tensor in host memory, which can be rebuilt with its device, stride and kind."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._device = tensor.device
        self._needs_grad = tensor.requires_grad and tensor.is_leaf
        self._is_parameter = isinstance(tensor, torch.nn.Parameter)
        plain = view_as_bits(tensor.detach())
        self._stride = get_saved_stride(tensor)
        self._dtype = tensor.dtype
        self._copy = plain.clone() if tensor.device.type == "cpu" else plain.cpu()

    def rebuild(self) -> torch.Tensor:
        """Return a new tensor with the recorded values, dtype, device and strides."""
        tensor = self._copy.to(self._device).view(self._dtype)
        if self._stride is not None:
            tensor = set_stride(tensor, self._stride)
        if self._is_parameter:
            return torch.nn.Parameter(tensor, self._needs_grad)
        return tensor.requires_grad_() if self._needs_grad else tensor
