"""Types and ranges of the training arguments: each field is checked against its annotation, each number against its range."""

import math
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import numpy

from headway.errors import ConfigError

# Own messages say more of these.
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


class Range(NamedTuple):
    """What a number may be: from `low` to less than `below`, or `also`; with what that means."""

    low: float
    below: float = math.inf
    also: float | None = None
    meaning: str = ""

    def holds(self, value: float) -> bool:
        """Is the value allowed?"""
        return self.low <= value < self.below or value == self.also

    def __str__(self) -> str:
        text = f"{self.low:g} or more" + ("" if math.isinf(self.below) else f" and below {self.below:g}")
        if self.also is not None:
            text += f", or {self.also:g}"
        return text + (f" ({self.meaning})" if self.meaning else "")


_NOT_NEGATIVE = """
    num_train_epochs learning_rate weight_decay adam_epsilon max_grad_norm eval_delay warmup_steps dataloader_num_workers
"""
_POSITIVE = """
    per_device_eval_batch_size gradient_accumulation_steps eval_accumulation_steps save_total_limit dataloader_prefetch_factor
"""
RANGES = {
    **dict.fromkeys(_NOT_NEGATIVE.split(), Range(0)),
    **dict.fromkeys(_POSITIVE.split(), Range(1)),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "label_smoothing_factor"), Range(0, 1)),
    **dict.fromkeys(("seed", "data_seed"), Range(0, 2**32)),
    "max_steps": Range(0, also=-1, meaning="-1 and 0: as many as num_train_epochs says"),
    "warmup_ratio": Range(0, 1, meaning="a share of all updates"),
}


def checked(arguments: Any, kind: type) -> dict[str, Any]:
    """The values of a dataclass's fields, each of a type that its annotation allows, and in its range.

    NumPy's scalars become Python's, 0 and 1 truth values where such are wanted, and whole floats integers.

    Args:
        arguments: the object.
        kind: the dataclass whose fields are checked; a subclass may have others.

    Raises:
        ConfigError: naming the first field that is neither.
    """
    # Not the fields' own types, which HfArgumentParser writes over.
    hints = get_type_hints(kind)
    kinds = {field.name: _kinds(hints[field.name]) for field in fields(kind) if field.name not in _SEEN_TO_ELSEWHERE}
    kinds["resume_from_checkpoint"] += (bool,)
    return {name: _checked(name, getattr(arguments, name), allowed) for name, allowed in kinds.items()}


def _kinds(annotation: Any) -> tuple[type, ...]:
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return tuple(getattr(part, "__origin__", part) for part in parts)


def _checked(name: str, value: Any, kinds: tuple[type, ...]) -> Any:
    limits = RANGES.get(name)
    for kind in sorted(kinds, key=list(_WORDS).index):
        fits, found = _as_kind(value, kind)
        if fits and (limits is None or isinstance(found, bool | str | None) or limits.holds(found)):
            return found
    words = [_WORDS[kind] for kind in kinds if kind is not type(None)]
    allowed = " or ".join(words) + (f", {limits}" if limits else "") + (", or None" if type(None) in kinds else "")
    raise ConfigError(f"{name}={value!r}; give {allowed}")


def _as_kind(value: Any, kind: type) -> tuple[bool, Any]:
    """(is it of that kind, the value as that kind has it)."""
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
