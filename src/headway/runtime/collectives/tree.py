"""Nested batches: lists, tuples, named tuples, mappings and dataclasses with tensors at their leaves; cut by their rows."""

import copy
import dataclasses
import inspect
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import numpy
import torch
from torch.nn.utils.rnn import PackedSequence

from headway.errors import DataError, UnsupportedError

Tree = Any
"""A tensor, a container of trees, or any other object (a leaf that is passed through)."""


def is_packed(tree: Tree) -> bool:
    """Is it a PackedSequence, a named tuple whose parts only make sense together?"""
    return isinstance(tree, PackedSequence)


def is_record(tree: Tree) -> bool:
    """Is it an object of a dataclass?"""
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


def map_leaves(fn: Callable[[Any], Any], tree: Tree, is_leaf: Callable[[Any], bool] = is_packed) -> Tree:
    """Apply `fn` to every leaf; containers come back as the type they were.

    Args:
        fn: from a leaf to what stands in its place.
        tree: nested containers.
        is_leaf: which containers, beside lists, tuples and dicts themselves, are not looked into.
    """
    if isinstance(tree, torch.Tensor | str | bytes):
        return fn(tree)
    kind = type(tree)
    if kind is dict:
        return {key: map_leaves(fn, value, is_leaf) for key, value in tree.items()}
    if kind is list:
        return [map_leaves(fn, value, is_leaf) for value in tree]
    if kind is tuple:
        return tuple(map_leaves(fn, value, is_leaf) for value in tree)
    return fn(tree) if is_leaf(tree) else _map_special(fn, tree, is_leaf)


def _map_special(fn: Callable[[Any], Any], tree: Tree, is_leaf: Callable[[Any], bool]) -> Tree:
    if isinstance(tree, Mapping):
        return like_mapping(tree, {key: map_leaves(fn, value, is_leaf) for key, value in tree.items()})
    if isinstance(tree, tuple | list):
        return like_sequence(tree, (map_leaves(fn, value, is_leaf) for value in tree))
    if is_record(tree):
        return like_dataclass(tree, {name: map_leaves(fn, value, is_leaf) for name, value in _fields(tree)})
    return fn(tree)


def _fields(tree: Any) -> Iterator[tuple[str, Any]]:
    """A dataclass's fields: those that its __init__ takes, and of the others those that hold tensors."""
    for field in dataclasses.fields(tree):
        value = getattr(tree, field.name, None)
        if field.init or any(True for _ in tensors(value)):
            yield field.name, value


def like_dataclass(kind: Any, values: dict[str, Any]) -> Any:
    """A dataclass of the type of `kind` with these values of its fields."""
    given = {field.name for field in dataclasses.fields(kind) if field.init}
    try:
        twin = dataclasses.replace(kind, **{name: value for name, value in values.items() if name in given})
        rest = set(values) - given
    except (ValueError, TypeError):  # __init__ also takes what is no field (an InitVar), which nobody knows any more
        twin, rest = copy.copy(kind), set(values)
    for name in rest:
        object.__setattr__(twin, name, values[name])  # also where it is frozen
    return twin


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
    if isinstance(tree, torch.Tensor | str | bytes) or is_packed(tree):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from leaves(value)
    elif is_record(tree):
        for _, value in _fields(tree):
            yield from leaves(value)
    else:
        yield tree


def tensors(tree: Tree) -> Iterator[torch.Tensor]:
    """Every tensor, in order."""
    return (leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor))


def structure(tree: Tree) -> str:
    """The containers' shape as text, with one mark a leaf: equal texts, equal nesting.

    Raises:
        DataError: a PackedSequence, whose rows are interleaved.
    """
    if isinstance(tree, torch.Tensor):
        return "*"
    if is_packed(tree):
        raise DataError(
            "a PackedSequence cannot be gathered or joined: its rows are interleaved; use torch.nn.utils.rnn.pad_packed_sequence"
        )
    if isinstance(tree, Mapping):
        return "{" + ",".join(f"{key}:{structure(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, list | tuple):
        return "[" + ",".join(structure(value) for value in tree) + "]"
    if is_record(tree):
        inner = ",".join(f"{name}:{structure(value)}" for name, value in _fields(tree))
        return f"{type(tree).__name__}({inner})"
    return "."


def find_batch_size(tree: Tree) -> int | None:
    """The first dimension of the first tensor that has one, the sequences of a PackedSequence; None where there is neither."""
    for leaf in leaves(tree):
        if isinstance(leaf, PackedSequence):
            return int(leaf.batch_sizes[0])  # which lies on the host, always
        if isinstance(leaf, torch.Tensor) and leaf.ndim > 0:
            return int(leaf.shape[0])
    return None


def moves_itself(tree: Tree) -> bool:
    """Has it a `to` of its own? Dicts with one (a BatchEncoding) are moved by their items all the same."""
    return not isinstance(tree, torch.Tensor | dict | UserDict) and callable(getattr(type(tree), "to", None))


def to_device(tree: Tree, device: torch.device, non_blocking: bool = False) -> Tree:
    """Every tensor on `device`; objects with a `to` of their own (a PackedSequence, a graph) move themselves.

    Raises:
        DataError: such an object's `to` does not take a device.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        return move_object(leaf, device, non_blocking) if moves_itself(leaf) else leaf

    return map_leaves(move, tree, moves_itself)


def move_object(item: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """What `item.to(device)` returns; the item itself, where it returns nothing.

    Raises:
        DataError: its `to` does not take a device.
    """
    try:
        moved = item.to(device, non_blocking=True) if non_blocking and _knows_non_blocking(item) else item.to(device)
    except (TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"the batch contains a {type(item).__name__} whose to({str(device)!r}) failed: {error}. Leave it out of the batch, "
            "or pass device_placement=False so that batches stay where they are"
        ) from error
    return item if moved is None else moved


def _knows_non_blocking(item: Any) -> bool:
    try:
        parameters = inspect.signature(item.to).parameters
    except (TypeError, ValueError):  # written in C
        return False
    return "non_blocking" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


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


def cut_rows(tree: Tree, start: int, stop: int, num_rows: int) -> Tree:
    """Rows `start` to `stop` of everything in the batch that has one entry a row; the rest passes through whole.

    Tensors and arrays of `num_rows` rows are cut, and lists and tuples of `num_rows` items that are no such tensors
    themselves; other containers keep their type.

    Raises:
        UnsupportedError: an object that moves itself to devices, so that it holds tensors, but has no rows that anyone knows.
    """
    if isinstance(tree, torch.Tensor | numpy.ndarray):
        return tree[start:stop] if _has_rows(tree, num_rows) else tree
    if moves_itself(tree) and not (dataclasses.is_dataclass(tree) or isinstance(tree, Mapping)):
        if stop - start < num_rows:
            raise UnsupportedError(
                f"a {type(tree).__name__} cannot be cut by rows; put tensors in the batch (pad_packed_sequence, or a dict of the "
                "object's tensors) and build the object from each piece in the loop"
            )
        return tree
    cut = partial(cut_rows, start=start, stop=stop, num_rows=num_rows)
    if isinstance(tree, Mapping):
        return like_mapping(tree, {key: cut(value) for key, value in tree.items()})
    if isinstance(tree, list | tuple):
        if len(tree) == num_rows and not any(_has_rows(item, num_rows) for item in tree):
            return tree[start:stop]
        return like_sequence(tree, [cut(item) for item in tree])
    if is_record(tree):
        cut_fields = {each.name: cut(getattr(tree, each.name)) for each in dataclasses.fields(tree) if each.init}
        return dataclasses.replace(tree, **cut_fields)
    return tree


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
