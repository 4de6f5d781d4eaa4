"""Nested batches: lists, tuples, named tuples, mappings and dataclasses with tensors at their leaves."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from headway.errors import DataError

Tree = Any
"""A tensor, a container of trees, or any other object (a leaf that is passed through)."""


def map_leaves(fn: Callable[[Any], Any], tree: Tree) -> Tree:
    """Apply `fn` to every leaf; containers come back as the type they were."""
    if isinstance(tree, torch.Tensor | str | bytes):
        return fn(tree)
    kind = type(tree)
    if kind is dict:
        return {key: map_leaves(fn, value) for key, value in tree.items()}
    if kind is list:
        return [map_leaves(fn, value) for value in tree]
    if kind is tuple:
        return tuple(map_leaves(fn, value) for value in tree)
    return _map_special(fn, tree)


def _map_special(fn: Callable[[Any], Any], tree: Tree) -> Tree:
    if isinstance(tree, Mapping):
        return like_mapping(tree, {key: map_leaves(fn, value) for key, value in tree.items()})
    if isinstance(tree, tuple | list):
        return like_sequence(tree, (map_leaves(fn, value) for value in tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree) if field.init]
        return dataclasses.replace(tree, **{name: map_leaves(fn, getattr(tree, name)) for name in names})
    return fn(tree)


def like_mapping(kind: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """The items in a mapping of the type of `kind`."""
    if type(kind) is dict:
        return items
    if not isinstance(kind, MutableMapping):
        return type(kind)(items)  # type: ignore[call-arg]
    # A copy keeps what the subclass holds beside its items: a default factory, an encoding.
    twin = copy.copy(kind)
    for key, value in items.items():
        twin[key] = value
    return twin


def like_sequence(kind: object, items: Iterable[Any]) -> Any:
    """The items in a list, tuple or named tuple of the type of `kind`."""
    return type(kind)(*items) if hasattr(kind, "_fields") else type(kind)(items)  # type: ignore[call-arg]


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Tree) -> Tree:
    """Apply `fn` to every tensor; other leaves pass through."""
    return map_leaves(lambda leaf: fn(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def leaves(tree: Tree) -> Iterator[Any]:
    """Every leaf, in order."""
    if isinstance(tree, torch.Tensor | str | bytes):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from leaves(value)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            if field.init:  # as in map_leaves
                yield from leaves(getattr(tree, field.name))
    else:
        yield tree


def tensors(tree: Tree) -> Iterator[torch.Tensor]:
    """Every tensor, in order."""
    return (leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor))


def structure(tree: Tree) -> str:
    """The containers' shape as text, with one mark a leaf: equal texts, equal nesting."""
    if isinstance(tree, torch.Tensor):
        return "*"
    if isinstance(tree, Mapping):
        return "{" + ",".join(f"{key}:{structure(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, list | tuple):
        return "[" + ",".join(structure(value) for value in tree) + "]"
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        inner = ",".join(f"{field.name}:{structure(getattr(tree, field.name))}" for field in dataclasses.fields(tree))
        return f"{type(tree).__name__}({inner})"
    return "."


def find_batch_size(tree: Tree) -> int | None:
    """The first dimension of the first tensor that has one; None where there is no such tensor."""
    return next((int(tensor.shape[0]) for tensor in tensors(tree) if tensor.ndim > 0), None)


def slice_rows(tree: Tree, start: int, stop: int) -> Tree:
    """Rows `start` to `stop` of every tensor with a first dimension; other leaves pass through."""
    return map_tensors(lambda tensor: tensor[start:stop] if tensor.ndim > 0 else tensor, tree)


def to_device(tree: Tree, device: torch.device, non_blocking: bool = False) -> Tree:
    """Every tensor on `device`; other objects with a `to` method of a batch's kind (BatchEncoding) go by their items."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking), tree)


def concatenate(trees: list[Tree], dim: int = 0) -> Tree:
    """Join equal trees tensor by tensor along `dim`.

    Raises:
        DataError: the trees differ in nesting.
    """
    shapes = {structure(tree) for tree in trees}
    if len(shapes) != 1:
        raise DataError(f"cannot concatenate trees of {len(shapes)} different structures: {sorted(shapes)}")
    columns = zip(*(list(tensors(tree)) for tree in trees))
    joined = iter([torch.cat(column, dim=dim) for column in columns])
    return map_tensors(lambda _: next(joined), trees[0])
