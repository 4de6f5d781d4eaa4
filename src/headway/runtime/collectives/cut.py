"""Cutting a batch into pieces by its rows, whatever containers it is made of."""

from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import numpy
import torch

from headway.errors import UnsupportedError
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
