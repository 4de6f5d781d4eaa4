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

_CHECKED_ELSEWHERE = frozenset({"per_device_train_batch_size", "generation_config"})
"""Arguments with a check of their own, whose messages are more specific."""
_TYPE_DESCRIPTIONS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    dict: "a dict",
    list: "a list of texts",
    type(None): "None",
}
"""Descriptions of types for error messages, in the order in which a value is compared with the types."""
_NOT_NEGATIVE = (
    "num_train_epochs", "learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm", "eval_delay", "warmup_steps",
    "dataloader_num_workers", "neftune_noise_alpha",
)  # fmt: skip
"""Names of arguments that must be 0 or more."""
_POSITIVE = (
    "per_device_eval_batch_size", "gradient_accumulation_steps", "eval_accumulation_steps", "save_total_limit",
    "dataloader_prefetch_factor", "packing_length", "num_best", "keep_every", "generation_max_length", "generation_num_beams",
    "ddp_bucket_cap_mb",
)  # fmt: skip
"""Names of arguments that must be 1 or more."""


class AllowedRange(NamedTuple):
    """Range of allowed values of a numeric argument.

    Attributes:
        minimum: Smallest allowed value.
        upper_bound: Upper bound, which is not allowed itself.
        extra_value: Additional allowed value outside of the range, or None.
        meaning: Description of the allowed values, for error messages.
    """

    minimum: float
    upper_bound: float = math.inf
    extra_value: float | None = None
    meaning: str = ""

    def is_allowed(self, value: float) -> bool:
        """Whether a value is in the range, or equals the additional allowed value."""
        return self.minimum <= value < self.upper_bound or value == self.extra_value

    def __str__(self) -> str:
        text = f"{self.minimum:g} or more"
        if not math.isinf(self.upper_bound):
            text += f" and below {self.upper_bound:g}"
        if self.extra_value is not None:
            text += f", or {self.extra_value:g}"
        return f"{text} ({self.meaning})" if self.meaning else text


RANGES = {
    **dict.fromkeys(_NOT_NEGATIVE, AllowedRange(0)),
    **dict.fromkeys(_POSITIVE, AllowedRange(1)),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "ema_decay", "label_smoothing_factor"), AllowedRange(0, 1)),
    **dict.fromkeys(("seed", "data_seed"), AllowedRange(0, 2**32)),
    "max_steps": AllowedRange(0, extra_value=-1, meaning="-1 and 0: as many as num_train_epochs requires"),
    "warmup_ratio": AllowedRange(0, 1, meaning="a share of all updates"),
}
"""Allowed values of numeric arguments, by name. Arguments that are not listed accept any number."""


def check_values(arguments: Any, arguments_class: type) -> dict[str, Any]:
    """Check types and ranges of training arguments, and return their values by name.

    NumPy scalars become Python numbers, 0 and 1 become bools where a bool is expected, and floats without a fraction
    become integers where an integer is expected. `per_device_train_batch_size` and `generation_config` are neither
    checked nor returned, and `resume_from_checkpoint` may be a bool, too.

    Args:
        arguments: Instance of `arguments_class` or of a subclass.
        arguments_class: `TrainingArguments`, whose fields are checked. Fields that only the subclass has are not checked.

    Raises:
        ConfigError: If a value has the wrong type or is out of range. The message names the first such field.
    """
    # Types are read from the annotations, because HfArgumentParser overwrites those in the fields.
    hints = get_type_hints(arguments_class)
    names = [field.name for field in fields(arguments_class) if field.name not in _CHECKED_ELSEWHERE]
    types_by_name = {name: _list_types(hints[name]) for name in names}
    types_by_name["resume_from_checkpoint"] += (bool,)  # HfArgumentParser does not support it in the annotation
    return {name: _check_value(name, getattr(arguments, name), types) for name, types in types_by_name.items()}


def _list_types(annotation: Any) -> tuple[type, ...]:
    """Return the types of a union, without their type arguments, or the only type of another annotation."""
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return tuple(getattr(part, "__origin__", part) for part in parts)


def _check_value(name: str, value: Any, types: tuple[type, ...]) -> Any:
    """Return an argument's value, converted to the first type that it fits.

    Args:
        name: Name of the argument.
        value: Value that the user has given.
        types: Allowed types.

    Raises:
        ConfigError: If it fits none of the types, or is out of range.
    """
    allowed_range = RANGES.get(name)
    # For example, 1 must become an int and not a float if both are allowed.
    for expected in sorted(types, key=list(_TYPE_DESCRIPTIONS).index):
        fits, converted = _convert_value(value, expected)
        is_number = not isinstance(converted, bool | str | None)
        if fits and (allowed_range is None or not is_number or allowed_range.is_allowed(converted)):
            return converted
    text = " or ".join(_TYPE_DESCRIPTIONS[each] for each in types if each is not type(None))
    if allowed_range is not None:
        text += f", {allowed_range}"
    if type(None) in types:
        text += ", or None"
    raise ConfigError(f"{name}={value!r}; give {text}")


def _convert_value(value: Any, expected: type) -> tuple[bool, Any]:
    """Convert a value to a type that an argument accepts, and report whether it fits.

    NumPy scalars first become Python values. bool accepts 0 and 1. int accepts floats without a fraction, but no bool.
    float accepts finite numbers, but no bool. list accepts a list or tuple of strings, dict any Mapping, and Path any
    `os.PathLike`.

    Returns:
        Pair of (whether it fits, converted value). The second item has no meaning if the first is False.
    """
    if isinstance(value, numpy.generic):
        value = value.item()
    is_bool = isinstance(value, bool)
    if expected is type(None):
        return value is None, None
    if expected is bool:
        return is_bool or (isinstance(value, int) and value in (0, 1)), bool(value)
    if expected is int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return isinstance(value, int) and not is_bool, value
    if expected is float:
        return isinstance(value, int | float) and not is_bool and math.isfinite(value), value
    if expected is Path:
        return isinstance(value, os.PathLike), value
    if expected is list:
        return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value), value
    return isinstance(value, Mapping if expected is dict else expected), value
