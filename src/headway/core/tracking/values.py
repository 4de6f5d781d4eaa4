"""Conversion of logged values: flatten nested mappings, and convert numbers and strings to plain Python types."""

from collections.abc import Mapping
from typing import Any

import numpy
import torch

from headway.common.dtensors import is_dtensor
from headway.core.tracking.runlog import Value, list_leaves
from headway.errors import TrackingError


def flatten(values: Mapping[Any, object]) -> dict[str, Any]:
    """Flatten nested mappings to one mapping. The keys on the way to a value are joined with '/'.

    Tensors are not copied from their device.

    Args:
        values: Nested mappings. A value of None is left out, because it means that there is no value in this step.
            Empty mappings are left out too.
    """
    # `list_leaves` yields an empty mapping as a leaf.
    return {name: value for name, value in list_leaves(values) if value is not None and not isinstance(value, Mapping)}


def reduce_sharded_numbers(values: object) -> object:
    """Return nested mappings in which the numbers of sharded tensors replace 0-d sharded tensors. Every rank calls it.

    Such a tensor, for example the norm of a sharded parameter, needs the parts of all ranks. Only rank 0 logs values, so
    the other ranks call this function only to take part in the collectives.
    """
    if isinstance(values, Mapping):
        return {name: reduce_sharded_numbers(value) for name, value in values.items()}
    if isinstance(values, torch.Tensor) and values.ndim == 0 and is_dtensor(values):
        return values.item()
    return values


def is_loggable(value: object) -> bool:
    """Whether the value is a single real number or a string. Tensors and arrays must be 0-d."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and not value.is_complex()
    if isinstance(value, numpy.ndarray | numpy.number):
        return value.ndim == 0 and not numpy.iscomplexobj(value)
    return isinstance(value, bool | int | float | str | numpy.bool_)


def to_python(value: object) -> Value:
    """Return the value as a Python number or string. A device tensor is copied to the host, which waits for the copy.

    Args:
        value: Value for which `is_loggable` is True.

    Raises:
        TrackingError: If the value is neither a real number nor a string.
    """
    if isinstance(value, torch.Tensor | numpy.ndarray | numpy.generic):
        value = value.item()
    for kind in (bool, int, float, str):  # convert subclasses, which may print differently
        if isinstance(value, kind):
            return kind(value)
    raise TrackingError(f"{describe_type(value)} cannot be logged")


def describe_type(value: object) -> str:
    """Return a description of the value's type, with shape and dtype for tensors and arrays."""
    if isinstance(value, torch.Tensor | numpy.ndarray):
        kind = "a tensor" if isinstance(value, torch.Tensor) else "an array"
        return f"{kind} of shape {tuple(value.shape)} and type {value.dtype}"
    return f"{type(value).__module__}.{type(value).__qualname__}"
