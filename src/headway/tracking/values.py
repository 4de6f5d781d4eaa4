"""What may be logged, flattened: numbers, 0-d tensors, numpy's scalars and text, by names joined with '/'."""

from collections.abc import Mapping
from typing import Any

import numpy
import torch

from headway.errors import TrackingError
from headway.tracking.runlog import Value


def flatten(values: Mapping[str, object], prefix: str = "", is_heard: bool = True) -> dict[str, Any]:
    """Nested mappings as one, names joined with '/'; everything in it can be logged. Nothing is read from a device.

    Args:
        values: a None among them is left out: there was no such value this time.
        prefix: of the names.
        is_heard: False: nothing is kept, and tensors of any shape are left out.

    Raises:
        TrackingError: naming the first entry that cannot be.
    """
    if not isinstance(values, Mapping):
        raise TrackingError(f"log() takes a mapping of names and values, not {_describe(values)}")
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(key, str):
            raise TrackingError(f"log() takes names as text; {key!r} is {_describe(key)}")
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}/", is_heard)
        elif value is None or (not is_heard and isinstance(value, torch.Tensor | numpy.ndarray)):
            continue
        elif is_loggable(value):
            flat[name] = value
        else:
            raise TrackingError(
                f"log() got {_describe(value)} for {name!r}; allowed: numbers, text, 0-d tensors and numpy scalars, and "
                f"mappings of them{_suggest(value)}"
            )
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
    raise TrackingError(f"{_describe(value)} cannot be logged")


def _is_complex(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_complex()
    return isinstance(value, numpy.generic | numpy.ndarray) and numpy.iscomplexobj(value)


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor | numpy.ndarray):
        kind = "a tensor" if isinstance(value, torch.Tensor) else "an array"
        return f"{kind} of shape {tuple(value.shape)} and type {value.dtype}"
    return f"{type(value).__name__} {str(value)[:60]!r}"


def _suggest(value: object) -> str:
    if isinstance(value, torch.Tensor | numpy.ndarray) and value.ndim:
        return "; reduce it first (.mean(), .sum(), .item())"
    return ""
