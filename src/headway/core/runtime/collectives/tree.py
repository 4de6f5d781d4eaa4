"""Helpers for nested batches: mapping over leaves, moving to devices, concatenating, and slicing rows.

A batch is a nesting of lists, tuples, named tuples, mappings and dataclasses with tensors at its leaves.
"""

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

from headway.errors import CallError, DataError, UnsupportedError

Tree = Any
"""A tensor, a container of trees, or any other object. Other objects are leaves and are passed through unchanged."""


def is_packed(tree: Tree) -> bool:
    """Whether the tree is a `PackedSequence`, a named tuple whose parts must stay together."""
    return isinstance(tree, PackedSequence)


def is_record(tree: Tree) -> bool:
    """Whether the tree is an instance of a dataclass."""
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


def map_leaves(fn: Callable[[Any], Any], tree: Tree, is_leaf: Callable[[Any], bool] = is_packed) -> Tree:
    """Apply a function to every leaf of a nested structure. Containers keep their types.

    Args:
        fn: Function that takes a leaf and returns its replacement.
        tree: Nested containers.
        is_leaf: Function that returns whether to treat a container as a leaf. It is not called for plain lists, tuples
            and dicts. Default: `is_packed`, so that only a PackedSequence is a leaf.
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
    """Apply a function to the leaves of a mapping, sequence or dataclass of a special type, and rebuild the container.

    Args:
        fn: Function from a leaf to its replacement.
        tree: Container, or a leaf.
        is_leaf: Function that returns whether to treat a container as a leaf.
    """
    if isinstance(tree, Mapping):
        return rebuild_mapping(tree, {key: map_leaves(fn, value, is_leaf) for key, value in tree.items()})
    if isinstance(tree, tuple | list):
        return rebuild_sequence(tree, (map_leaves(fn, value, is_leaf) for value in tree))
    if is_record(tree):
        return rebuild_dataclass(tree, {name: map_leaves(fn, value, is_leaf) for name, value in _iterate_fields(tree)})
    return fn(tree)


def _iterate_fields(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for each field of a dataclass that `__init__` accepts or that contains tensors."""
    for field in dataclasses.fields(tree):
        value = getattr(tree, field.name, None)
        if field.init or any(True for _ in list_tensors(value)):
            yield field.name, value


def rebuild_dataclass(template: Any, values: dict[str, Any]) -> Any:
    """Copy a dataclass instance with new field values, even if the dataclass is frozen.

    Fields that `__post_init__` derives are computed again. The new values are kept as given, even if `__post_init__`
    changes its fields, for example by scaling pixels, which must happen only once.

    Args:
        template: Instance to copy. It is not changed.
        values: New values by field name. Other arguments of `__init__` keep their values.
    """
    init_names = {field.name for field in dataclasses.fields(template) if field.init}
    try:
        result = dataclasses.replace(template, **{name: value for name, value in values.items() if name in init_names})
    except Exception:  # __init__ has parameters that are not fields (InitVar), or __post_init__ rejects its own results
        result = copy.copy(template)
    for name, value in values.items():
        object.__setattr__(result, name, value)  # works for frozen dataclasses too
    return result


def rebuild_mapping(template: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping with new items that has the type of another mapping.

    For a plain dict, `items` itself is returned. The result for a mutable mapping is a shallow copy that keeps other
    attributes, such as the default factory, and also the items whose keys are not in `items`.

    Args:
        template: Mapping whose type and attributes the result gets. It is not changed.
        items: New items.
    """
    if type(template) is dict:
        return items
    if not isinstance(template, MutableMapping):
        return type(template)(items)  # type: ignore[call-arg]
    # A copy keeps the subclass's other attributes, such as a default factory or an encoding.
    result = copy.copy(template)
    for key, value in items.items():
        result[key] = value
    return result


def rebuild_sequence(template: object, items: Iterable[Any]) -> Any:
    """Copy a list, tuple or named tuple with new items.

    Args:
        template: Sequence to copy. It determines the type of the copy.
        items: Items of the copy.
    """
    is_named_tuple = hasattr(template, "_fields")
    return type(template)(*items) if is_named_tuple else type(template)(items)  # type: ignore[call-arg]


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Tree) -> Tree:
    """Apply `fn` to every tensor of a nested structure. Other leaves are returned unchanged."""
    return map_leaves(lambda leaf: fn(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def replace_tensors(tree: Tree, tensors: Iterable[torch.Tensor]) -> Tree:
    """Return a nested structure with other tensors. Other leaves are unchanged.

    Args:
        tree: Nested structure.
        tensors: New tensors, in the order of `list_tensors`.
    """
    replacements = iter(tensors)
    return map_tensors(lambda _: next(replacements), tree)


def copy_containers(tree: Tree) -> Tree:
    """Return a copy of nested lists, dicts and tuples. The leaves are not copied."""
    return map_leaves(lambda leaf: leaf, tree)


def copy_views(tree: Tree) -> Tree:
    """Return the batch with every tensor copied that uses only a part of its storage.

    Other leaves are not copied. Pickling a view would include the whole storage of its base tensor.
    """
    return map_tensors(lambda tensor: tensor.clone() if _is_view(tensor) else tensor, tree)


def _is_view(tensor: torch.Tensor) -> bool:
    """Whether the tensor uses only a part of its storage. False for sparse tensors, whose storage cannot be checked."""
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes


def list_leaves(tree: Tree) -> Iterator[Any]:
    """Yield every leaf of a nested batch, in order."""
    if isinstance(tree, torch.Tensor | str | bytes) or is_packed(tree):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from list_leaves(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from list_leaves(value)
    elif is_record(tree):
        for _, value in _iterate_fields(tree):
            yield from list_leaves(value)
    else:
        yield tree


def list_tensors(tree: Tree) -> Iterator[torch.Tensor]:
    """Yield every tensor of a nested batch, in order."""
    return (leaf for leaf in list_leaves(tree) if isinstance(leaf, torch.Tensor))


def name_leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield pairs of (path, leaf) for every leaf of a nested batch.

    A path is written like a Python expression, such as `['loss'][0]` or `.logits`. It is "" if the tree itself is a
    leaf.

    Args:
        tree: Nested batch.
        prefix: Start of every path, for the recursion. Default: "".
    """
    if isinstance(tree, torch.Tensor | str | bytes) or is_packed(tree):
        yield prefix, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from name_leaves(value, f"{prefix}[{key!r}]")
    elif isinstance(tree, list | tuple):
        names = getattr(tree, "_fields", None)
        for index, value in enumerate(tree):
            yield from name_leaves(value, f"{prefix}.{names[index]}" if names else f"{prefix}[{index}]")
    elif is_record(tree):
        for name, value in _iterate_fields(tree):
            yield from name_leaves(value, f"{prefix}.{name}")
    else:
        yield prefix, tree


def require_tensors(tree: Tree, operation: str) -> None:
    """Check that the tree is a tensor or a container of tensors and None, so that ranks can exchange it.

    Args:
        tree: Argument of the collective.
        operation: Name of the collective, for the message.

    Raises:
        CallError: If there is another kind of leaf, or the tree itself is None. Such a leaf would not be transferred,
            and could differ between ranks.
    """
    if isinstance(tree, torch.Tensor):
        return
    for path, leaf in name_leaves(tree):
        if isinstance(leaf, torch.Tensor) or (leaf is None and path):
            continue
        place = f" in the entry {path}" if path else ""
        raise CallError(
            f"{operation}() got {_describe_leaf(leaf)}{place}, but exchanges only tensors, nested in lists, tuples, dicts and "
            f"dataclasses: each rank would keep its own value. {_suggest_tensor(leaf)}"
        )


def _describe_leaf(leaf: Any) -> str:
    """Return the type of a leaf, and its shape or the start of its repr, for messages."""
    kind = type(leaf)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    if isinstance(leaf, numpy.ndarray):
        return f"a {name} of shape {leaf.shape}"
    return "None" if leaf is None else f"a {name} ({leaf!r:.40})"


def _suggest_tensor(leaf: Any) -> str:
    """Return advice for a leaf that is not a tensor, in a call that accepts only tensors."""
    if isinstance(leaf, bool | int | float | complex | numpy.generic):
        return "Write torch.tensor(value, device=accelerator.device); for a mean over ranks, reduce_mean(total, weight)"
    if isinstance(leaf, numpy.ndarray):
        return "Write torch.as_tensor(array, device=accelerator.device)"
    if is_packed(leaf):
        return "Pass the tensor and the lengths that torch.nn.utils.rnn.pad_packed_sequence returns"
    return "Leave it out, or gather objects with headway.utils.gather_object([value])"


def describe_structure(tree: Tree) -> str:
    """Return the nesting of containers as text, with one symbol per leaf. Trees with equal nesting give equal texts.

    The symbol is "*" for a tensor, "-" for None and "." for any other leaf. Shapes and dtypes are not included.

    Raises:
        DataError: If the tree contains a PackedSequence, whose rows are interleaved.
    """
    if isinstance(tree, torch.Tensor):
        return "*"
    if is_packed(tree):
        raise DataError(
            "a PackedSequence cannot be gathered or joined: its rows are interleaved; use torch.nn.utils.rnn.pad_packed_sequence"
        )
    if isinstance(tree, Mapping):
        return "{" + ",".join(f"{key}:{describe_structure(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, list | tuple):
        return "[" + ",".join(describe_structure(value) for value in tree) + "]"
    if is_record(tree):
        inner = ",".join(f"{name}:{describe_structure(value)}" for name, value in _iterate_fields(tree))
        return f"{type(tree).__name__}({inner})"
    return "-" if tree is None else "."


def find_batch_size(tree: Tree) -> int | None:
    """Return the size of dim 0 of the first non-0-d tensor in a batch, or None if there is no such tensor.

    It is this rank's number of rows. In a mapping with `input_ids`, this tensor counts, because `pixel_values` before it
    can have one entry per image or patch. For a PackedSequence, return the number of its sequences.

    Args:
        tree: Tensor, or nested lists, tuples, dicts and dataclasses with tensors, such as a batch of a DataLoader.
    """
    if isinstance(tree, Mapping):
        input_ids = tree.get("input_ids")
        if isinstance(input_ids, torch.Tensor) and input_ids.ndim > 0:
            return int(input_ids.shape[0])
    for leaf in list_leaves(tree):
        if isinstance(leaf, PackedSequence):
            return int(leaf.batch_sizes[0])  # always a CPU tensor
        if isinstance(leaf, torch.Tensor) and leaf.ndim > 0:
            return int(leaf.shape[0])
    return None


def can_move_itself(tree: Tree) -> bool:
    """Whether an object that is not a tensor is moved to a device by its own `to` method.

    False for dicts and UserDicts (such as a BatchEncoding), whose items are moved one by one instead.
    """
    return not isinstance(tree, torch.Tensor | dict | UserDict) and callable(getattr(type(tree), "to", None))


def to_device(tree: Tree, device: torch.device, non_blocking: bool = False) -> Tree:
    """Return the tree with every tensor on `device`.

    Objects with their own `to` method (a PackedSequence, a graph) are moved by that method.

    Args:
        tree: Nested containers.
        device: Target device.
        non_blocking: Whether to copy asynchronously. Default: False.

    Raises:
        DataError: If the `to` method of an object fails.
    """

    def move_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        return move_object(leaf, device, non_blocking) if can_move_itself(leaf) else leaf

    return map_leaves(move_leaf, tree, can_move_itself)


def move_object(item: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Return `item.to(device)`, or `item` if that returns None.

    Args:
        item: Object with a `to` method.
        device: Target device.
        non_blocking: Whether to request an asynchronous copy, if `to` has such an argument. Default: False.

    Raises:
        DataError: If `to` raises a TypeError, ValueError or AttributeError, for example because it takes no device.
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
    """Whether an object's own `to` method accepts the argument `non_blocking`."""
    try:
        parameters = inspect.signature(item.to).parameters
    except (TypeError, ValueError):  # no signature, as for functions written in C
        return False
    return "non_blocking" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def concatenate(trees: list[Tree], dim: int = 0) -> Tree:
    """Concatenate trees of equal structure, tensor by tensor along `dim`. Other leaves are taken from the first tree.

    Raises:
        DataError: If the trees differ in nesting, contain a PackedSequence, or if there is no tree.
    """
    structures = {describe_structure(tree) for tree in trees}
    if len(structures) != 1:
        raise DataError(f"cannot concatenate trees of {len(structures)} different structures: {sorted(structures)}")
    columns = zip(*(list_tensors(tree) for tree in trees))
    return replace_tensors(trees[0], [torch.cat(column, dim=dim) for column in columns])


def slice_rows(tree: Tree, start: int, stop: int, num_rows: int) -> Tree:
    """Slice rows `start` to `stop` of all entries that have one item per row. Other entries are returned unchanged.

    Tensors and arrays of `num_rows` rows are sliced. So are lists and tuples of `num_rows` items, unless they
    contain tensors of `num_rows` rows. Other containers keep their type.

    Args:
        tree: Batch to slice.
        start: Index of the first row.
        stop: Index after the last row.
        num_rows: Number of rows of the full batch.

    Raises:
        UnsupportedError: If an object with its own `to` method would have to be sliced. Such an object holds tensors,
            but its rows are unknown.
    """
    if isinstance(tree, torch.Tensor | numpy.ndarray):
        return tree[start:stop] if _has_rows(tree, num_rows) else tree
    if can_move_itself(tree) and not (dataclasses.is_dataclass(tree) or isinstance(tree, Mapping)):
        if stop - start < num_rows:
            raise UnsupportedError(
                f"a {type(tree).__name__} cannot be split by rows; put tensors in the batch (pad_packed_sequence, or a dict of the "
                "object's tensors) and build the object from each micro-batch in the loop"
            )
        return tree
    cut = partial(slice_rows, start=start, stop=stop, num_rows=num_rows)
    if isinstance(tree, Mapping):
        return rebuild_mapping(tree, {key: cut(value) for key, value in tree.items()})
    if isinstance(tree, list | tuple):
        if len(tree) == num_rows and not any(_has_rows(item, num_rows) for item in tree):
            return tree[start:stop]
        return rebuild_sequence(tree, [cut(item) for item in tree])
    if is_record(tree):
        return rebuild_dataclass(tree, {name: cut(value) for name, value in _iterate_fields(tree)})
    return tree


def _has_rows(item: Any, num_rows: int) -> bool:
    return isinstance(item, torch.Tensor | numpy.ndarray) and item.ndim > 0 and item.shape[0] == num_rows


def compute_slice_bounds(num_items: int, num_parts: int, index: int) -> tuple[int, int]:
    """Return the pair (start, stop) of part `index` when `num_items` items are divided into `num_parts` parts.

    The first `num_items % num_parts` parts have one more item than the others.

    Args:
        num_items: Number of items.
        num_parts: Number of parts.
        index: Index of the part, from 0.
    """
    size, num_larger = divmod(num_items, num_parts)
    start = index * size + min(index, num_larger)
    if index < num_larger:
        size += 1
    return start, start + size


def split_inputs(inputs: Any, num_parts: int, index: int, apply_padding: bool = False) -> Any:
    """Return part `index` of `inputs`. The input is not changed.

    The part has the type of the input, except that mappings become dicts. A tensor or array without padding is a view.

    Args:
        inputs: List, tuple, tensor, NumPy array, Hugging Face Dataset, or a dict of these with equal lengths.
        num_parts: Number of parts.
        index: Index of the requested part.
        apply_padding: Whether to pad all parts to the length of the longest one by repeating the input's last item.
            Default: False.

    Raises:
        DataError: If the type is not supported, or the values of a dict differ in length.
    """
    if isinstance(inputs, Mapping):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"cannot split a dict whose values differ in length: {lengths}")
        return {key: split_inputs(value, num_parts, index, apply_padding) for key, value in inputs.items()}
    if not (hasattr(inputs, "__len__") and hasattr(inputs, "__getitem__")) or isinstance(inputs, str | bytes):
        raise DataError(
            f"cannot split a {type(inputs).__name__}; give a list, tuple, tensor, Dataset, or a dict of those"
        )
    num_items = len(inputs)
    start, stop = compute_slice_bounds(num_items, num_parts, index)
    longest = -(-num_items // num_parts)
    num_missing = longest - (stop - start) if apply_padding else 0
    return _take_rows(inputs, start, stop, num_missing)


def _take_rows(inputs: Any, start: int, stop: int, num_missing: int) -> Any:
    """Return the rows `start` to `stop` - 1 of a batch, followed by `num_missing` copies of its last row.

    Args:
        inputs: Tensor, array, sequence, or Hugging Face Dataset.
        start: Index of the first row.
        stop: Index after the last row.
        num_missing: Number of additional rows.
    """
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
