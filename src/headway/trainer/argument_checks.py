"""Checks of the types and ranges of training arguments."""

import math
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import numpy

from headway.errors import ConfigError

# Arguments whose own checks have more specific messages.
_SEEN_TO_ELSEWHERE = frozenset({"per_device_train_batch_size"})
_WORDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    dict: "a dict",
    list: "a list of texts",
    type(None): "None",
}
_NOT_NEGATIVE = """
    num_train_epochs learning_rate weight_decay adam_epsilon max_grad_norm eval_delay warmup_steps dataloader_num_workers
"""
_POSITIVE = """
    per_device_eval_batch_size gradient_accumulation_steps eval_accumulation_steps save_total_limit dataloader_prefetch_factor
    packing_length
"""


class AllowedRange(NamedTuple):
    """Range of allowed values of a numeric argument.

    Attributes:
        low: Smallest allowed value.
        below: Upper bound, which is not allowed itself.
        also: Additional allowed value outside of the range, or None.
        meaning: Description of the allowed values, for error messages.
    """

    low: float
    below: float = math.inf
    also: float | None = None
    meaning: str = ""

    def is_allowed(self, value: float) -> bool:
        """Whether a value is in the range, or equals the additional allowed value."""
        return self.low <= value < self.below or value == self.also

    def __str__(self) -> str:
        text = f"{self.low:g} or more" + ("" if math.isinf(self.below) else f" and below {self.below:g}")
        if self.also is not None:
            text += f", or {self.also:g}"
        return text + (f" ({self.meaning})" if self.meaning else "")


RANGES = {
    **dict.fromkeys(_NOT_NEGATIVE.split(), AllowedRange(0)),
    **dict.fromkeys(_POSITIVE.split(), AllowedRange(1)),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "ema_decay", "label_smoothing_factor"), AllowedRange(0, 1)),
    **dict.fromkeys(("seed", "data_seed"), AllowedRange(0, 2**32)),
    "max_steps": AllowedRange(0, also=-1, meaning="-1 and 0: as many as num_train_epochs requires"),
    "warmup_ratio": AllowedRange(0, 1, meaning="a share of all updates"),
}


def check_values(arguments: Any, kind: type) -> dict[str, Any]:
    """Check types and ranges of training arguments, and return their values by name.

    NumPy scalars become Python numbers, 0 and 1 become bools where a bool is expected, and floats without a fraction
    become integers where an integer is expected. `per_device_train_batch_size` is neither checked nor returned, and
    `resume_from_checkpoint` may be a bool, too.

    Args:
        arguments: Instance of `kind` or of a subclass.
        kind: `TrainingArguments`, whose fields are checked. Fields that only the subclass has are not checked.

    Raises:
        ConfigError: If a value has the wrong type or is out of range. The message names the first such field.
    """
    # Types are read from the annotations, because HfArgumentParser overwrites those in the fields.
    hints = get_type_hints(kind)
    kinds = {
        field.name: _list_types(hints[field.name]) for field in fields(kind) if field.name not in _SEEN_TO_ELSEWHERE
    }
    kinds["resume_from_checkpoint"] += (bool,)
    return {name: _check_value(name, getattr(arguments, name), allowed) for name, allowed in kinds.items()}


def _list_types(annotation: Any) -> tuple[type, ...]:
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return tuple(getattr(part, "__origin__", part) for part in parts)


def _check_value(name: str, value: Any, kinds: tuple[type, ...]) -> Any:
    limits = RANGES.get(name)
    for kind in sorted(kinds, key=list(_WORDS).index):
        fits, found = _convert_value(value, kind)
        if fits and (limits is None or isinstance(found, bool | str | None) or limits.is_allowed(found)):
            return found
    words = [_WORDS[kind] for kind in kinds if kind is not type(None)]
    allowed = " or ".join(words) + (f", {limits}" if limits else "") + (", or None" if type(None) in kinds else "")
    raise ConfigError(f"{name}={value!r}; give {allowed}")


def _convert_value(value: Any, kind: type) -> tuple[bool, Any]:
    """Check whether a value fits an expected type, and convert it.

    NumPy scalars become Python numbers. For a bool, 0 and 1 become bools. For an int, floats without a fraction become
    integers. All other values stay unchanged.

    Returns:
        Pair of (whether the value fits this type, converted value). The second item has no meaning if the first is
            False.
    """
    if isinstance(value, numpy.generic):
        value = value.item()
    is_truth = isinstance(value, bool)
    if kind is type(None):
        return value is None, None
    if kind is bool:
        return is_truth or (isinstance(value, int) and value in (0, 1)), bool(value)
    if kind is int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return isinstance(value, int) and not is_truth, value
    if kind is float:
        return isinstance(value, int | float) and not is_truth and math.isfinite(value), value
    if kind is Path:
        return isinstance(value, os.PathLike), value
    if kind is list:
        return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value), value
    return isinstance(value, Mapping if kind is dict else kind), value
