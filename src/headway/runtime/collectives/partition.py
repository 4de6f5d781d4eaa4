"""Dealing a sequence out to processes: exact slices, every item on one process."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headway.errors import DataError


def slice_bounds(num_items: int, num_parts: int, index: int) -> tuple[int, int]:
    """Where part `index` begins and ends; the first `num_items % num_parts` parts hold one item more."""
    size, rest = divmod(num_items, num_parts)
    start = index * size + min(index, rest)
    return start, start + size + (index < rest)


def split(inputs: Any, num_parts: int, index: int, apply_padding: bool = False) -> Any:
    """Part `index` of `inputs`, a new object of the same kind; the input is left as it was.

    Args:
        inputs: a list, tuple, tensor, NumPy array, Hugging Face Dataset, or a dict of those of one length.
        num_parts: how many parts there are.
        index: which one is wanted.
        apply_padding: make all parts as long as the longest by repeating the input's last item.

    Raises:
        DataError: another kind, or a dict of different lengths.
    """
    if isinstance(inputs, Mapping):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"cannot split a dict whose values differ in length: {lengths}")
        return {key: split(value, num_parts, index, apply_padding) for key, value in inputs.items()}
    if not (hasattr(inputs, "__len__") and hasattr(inputs, "__getitem__")) or isinstance(inputs, str | bytes):
        raise DataError(
            f"cannot split a {type(inputs).__name__}; give a list, tuple, tensor, Dataset, or a dict of those"
        )
    num_items = len(inputs)
    start, stop = slice_bounds(num_items, num_parts, index)
    longest = -(-num_items // num_parts)
    num_missing = longest - (stop - start) if apply_padding else 0
    return _take(inputs, start, stop, num_missing)


def _take(inputs: Any, start: int, stop: int, num_missing: int) -> Any:
    last = len(inputs) - 1
    if isinstance(inputs, torch.Tensor):
        return torch.cat([inputs[start:stop], *[inputs[-1:]] * num_missing]) if num_missing else inputs[start:stop]
    if hasattr(inputs, "select"):  # a Hugging Face Dataset: slicing it gives a dict of columns
        return inputs.select([*range(start, stop), *[last] * num_missing])
    if not num_missing:
        return inputs[start:stop]
    if isinstance(inputs, Sequence):
        padded = [*inputs[start:stop], *[inputs[-1]] * num_missing]
        return tuple(padded) if isinstance(inputs, tuple) else padded  # a range cannot repeat its last item
    return inputs[[*range(start, stop), *[last] * num_missing]]
