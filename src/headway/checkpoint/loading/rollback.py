"""The way back from a load that failed half-way: what was changed, last first, and every step of it."""

from collections.abc import Callable
from typing import Any

import numpy
import torch

from headway.checkpoint.format.tensors import is_dense
from headway.checkpoint.format.values import encode, map_items
from headway.errors import CheckpointError
from headway.weights.pieces import held, is_dtensor
from headway.weights.shards import bits, raw_bytes


class LoadRollback:
    """What a load has changed so far."""

    def __init__(self) -> None:
        self._steps: list[tuple[str, Callable[[], Any]]] = []

    def add(self, what: str, back: Callable[[], Any]) -> None:
        """`what` is about to change; `back` puts it back."""
        self._steps.append((what, back))

    def run(self) -> list[str]:
        """Put everything back; returns a line for each that could not be."""
        problems = []
        while self._steps:
            what, back = self._steps.pop()
            try:
                back()
            except Exception as error:  # the others go back all the same
                problems.append(f"{what} ({type(error).__name__}: {error})")
        return problems


def preserved(state: Any) -> Callable[[], Any]:
    """A function that returns the state as it is now, whatever becomes of it; tensors are copied to the host meanwhile."""
    kept = _keep(state)
    return lambda: _back(kept)


def is_same_state(one: Any, other: Any) -> bool:
    """Do the two hold the same values, bit by bit? Of what no checkpoint holds nobody knows: False."""
    told = []
    for state in (one, other):
        tensors: dict[str, torch.Tensor] = {}
        try:
            told.append((encode(state, "", tensors), tensors))
        except CheckpointError:
            return False
    (first, mine), (second, theirs) = told
    return bool(first == second) and all(
        tensor.dtype == theirs[name].dtype and torch.equal(raw_bytes(held(tensor)), raw_bytes(held(theirs[name])))
        for name, tensor in mine.items()
    )


class _TensorValue:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._device = tensor.device
        self._needs_grad = tensor.requires_grad and tensor.is_leaf
        self._is_parameter = isinstance(tensor, torch.nn.Parameter)
        plain = bits(tensor.detach())
        self._dtype = tensor.dtype
        self._copy = plain.clone() if tensor.device.type == "cpu" else plain.cpu()

    def back(self) -> torch.Tensor:
        tensor = self._copy.to(self._device).view(self._dtype)
        if self._is_parameter:
            return torch.nn.Parameter(tensor, self._needs_grad)
        return tensor.requires_grad_() if self._needs_grad else tensor


def _keep(value: Any) -> Any:
    if is_dtensor(value):
        return value.detach().clone()
    if isinstance(value, torch.Tensor):
        return _TensorValue(value) if is_dense(value) and not value.is_meta else value
    if isinstance(value, numpy.ndarray):
        return value.copy()
    return map_items(_keep, value)


def _back(value: Any) -> Any:
    return value.back() if isinstance(value, _TensorValue) else map_items(_back, value)
