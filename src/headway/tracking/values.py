"""What may be logged, by names joined with '/': numbers, 0-d tensors, numpy's scalars, text; and what only some trackers know."""

from collections.abc import Mapping
from typing import Any

import numpy
import torch

from headway.errors import TrackingError
from headway.tracking.runlog import Value


def flatten(values: Mapping[Any, object], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, names joined with '/'. Nothing is read from a device.

    Args:
        values: a None among them is left out: there was no such value this time.
        prefix: of the names.
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}/")
        elif value is not None:
            flat[name] = value
    return flat


def is_loggable(value: object) -> bool:
    """Is it one number or a text?"""
    if isinstance(value, torch.Tensor | numpy.ndarray):
        return value.ndim == 0 and not _is_complex(value)
    return isinstance(value, bool | int | float | str | numpy.number | numpy.bool_) and not _is_complex(value)


def to_python(value: object) -> Value:
    """The value as Python has it; a tensor on a device is waited for."""
    if isinstance(value, torch.Tensor | numpy.ndarray | numpy.generic):
        value = value.item()
    for kind in (bool, int, float, str):  # a subclass of theirs may know no other printing than its own
        if isinstance(value, kind):
            return kind(value)
    raise TrackingError(f"{describe(value)} cannot be logged")


def describe(value: object) -> str:
    """What kind of thing it is."""
    if isinstance(value, torch.Tensor | numpy.ndarray):
        kind = "a tensor" if isinstance(value, torch.Tensor) else "an array"
        return f"{kind} of shape {tuple(value.shape)} and type {value.dtype}"
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _is_complex(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_complex()
    return isinstance(value, numpy.generic | numpy.ndarray) and numpy.iscomplexobj(value)
