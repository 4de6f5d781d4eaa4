"""Cutting: a batch into pieces by its rows, and a sequence into exact slices for the processes."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import numpy
import torch

from headway.errors import DataError, UnsupportedError
from headway.runtime.collectives.tree import Tree, moves_itself


def cut_rows(tree: Tree, start: int, stop: int, num_rows: int) -> Tree:
    """Rows `start` to `stop` of everything in the batch that has one entry a row; the rest passes through whole.

    Tensors and arrays of `num_rows` rows are cut, and lists and tuples of `num_rows` items that are no such tensors
    themselves; other containers keep their type.

    Raises:
        UnsupportedError: an object that moves itself to devices, so that it holds tensors, but has no rows that anyone knows.
    """
    if isinstance(tree, torch.Tensor | numpy.ndarray):
        return tree[start:stop] if tree.ndim > 0 and tree.shape[0] == num_rows else tree
    if moves_itself(tree) and not (is_dataclass(tree) or isinstance(tree, Mapping)):
        if stop - start < num_rows:
            raise UnsupportedError(
                f"a {type(tree).__name__} cannot be cut by rows; put tensors in the batch (pad_packed_sequence, or a dict of the "
                "object's tensors) and build the object from each piece in the loop"
            )
        return tree
    cut = partial(cut_rows, start=start, stop=stop, num_rows=num_rows)
    if isinstance(tree, Mapping):
        return _map_values(cut, tree)
    if isinstance(tree, list | tuple):
        if len(tree) == num_rows and not any(_has_rows(item, num_rows) for item in tree):
            return tree[start:stop]
        items = [cut(item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(tree, **{field.name: cut(getattr(tree, field.name)) for field in fields(tree) if field.init})
    return tree


def _map_values(fn: Callable[[Any], Any], tree: Mapping[Any, Any]) -> Any:
    values = {key: fn(value) for key, value in tree.items()}
    if type(tree) is dict:
        return values
    if not isinstance(tree, MutableMapping):
        return type(tree)(values)  # type: ignore[call-arg]
    twin = copy(tree)
    for key, value in values.items():
        twin[key] = value
    return twin


def _has_rows(item: Any, num_rows: int) -> bool:
    return isinstance(item, torch.Tensor | numpy.ndarray) and item.ndim > 0 and item.shape[0] == num_rows


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
