"""Hashes and samples of tensors, and hashes of batch rows, small enough to be recorded for each update."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy
import torch

MOST_VALUES = 4096
"""Largest number of values that are recorded per tensor. Larger tensors are sampled at regular intervals."""
_PADDING = (0, 1, -100)
"""Integers that count as padding in a row of tokens or labels."""


def hash_bytes(*parts: bytes) -> str:
    """Return a hash of the concatenated parts as 16 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def to_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's values."""
    plain = tensor.detach().cpu().contiguous()
    return bytes(plain.reshape(-1).view(torch.uint8).numpy().tobytes()) if plain.numel() else b""


def hash_tensor(tensor: torch.Tensor) -> str:
    """Return a hash of a tensor's values and its shape."""
    return hash_bytes(str(tuple(tensor.shape)).encode(), to_bytes(tensor))


def sample_values(tensor: torch.Tensor) -> "numpy.ndarray[Any, Any]":
    """Return the values of a tensor as a 1-D float32 array. Tensors with more than `MOST_VALUES` values are sampled.

    A sample is followed by the norm and the sum of all values, so that changes outside of the sample are noticed.
    """
    flat = tensor.detach().reshape(-1)
    if flat.dtype.is_complex:
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    values = flat.to(torch.float64)
    if len(flat) > MOST_VALUES:
        # An odd stride reaches all columns of a matrix whose width is a power of two.
        stride = len(flat) // MOST_VALUES | 1
        totals = torch.stack([values.norm(), values.sum()])
        values = torch.cat([values[::stride][:MOST_VALUES], totals])
    return values.to(torch.float32).cpu().numpy()


def measure_norm(tensor: torch.Tensor) -> float:
    """Return the Euclidean norm of a real or complex tensor, computed in float64."""
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return float(values.to(torch.float64).norm())


# -------------------------------------------------------------------- batches


def walk_tensors(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield pairs of (path, leaf) for the leaves of nested lists, tuples, mappings and dataclasses.

    Leaves that are not tensors are yielded, too. A path consists of keys, indices and field names, such as ".0.labels".

    Args:
        tree: Nested collections.
        path: Text that each path begins with. Default: "".
    """
    if isinstance(tree, Mapping):
        for key in tree:
            yield from walk_tensors(tree[key], f"{path}.{key}")
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from walk_tensors(value, f"{path}.{index}")
    elif is_dataclass(tree) and not isinstance(tree, type):
        for each in fields(tree):
            yield from walk_tensors(getattr(tree, each.name), f"{path}.{each.name}")
    else:
        yield path, tree


def hash_rows(tree: Any, num_rows: int) -> tuple[list[str], list[str]]:
    """Return two lists of hashes, each with one hash per row of a batch.

    The second list ignores padding, so that it does not depend on the length to which a batch was padded.

    Args:
        tree: Batch, as nested collections of tensors. Only tensors whose first dimension is `num_rows` are hashed.
        num_rows: Number of rows of the batch.
    """
    parts: list[list[bytes]] = [[] for _ in range(num_rows)]
    unpadded_parts: list[list[bytes]] = [[] for _ in range(num_rows)]
    for path, leaf in walk_tensors(tree):
        if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == num_rows:
            rows, name = leaf.detach().cpu(), path.encode()
            for index in range(num_rows):
                row = rows[index]
                parts[index].append(name + str(tuple(row.shape)).encode() + to_bytes(row))
                unpadded_parts[index].append(name + to_bytes(_strip_padding(row)))
    return [hash_bytes(*each) for each in parts], [hash_bytes(*each) for each in unpadded_parts]


def _strip_padding(row: torch.Tensor) -> torch.Tensor:
    """Return the values of a row that are not padding. A scalar is returned unchanged.

    In a 1-D row of integers, the values in `_PADDING` and the repetitions of the last other value count as padding. In
    all other rows, zeros do.
    """
    if not row.ndim:
        return row
    if row.is_floating_point() or row.dtype == torch.bool or row.ndim > 1:
        return row[row != 0]
    is_kept = torch.ones_like(row, dtype=torch.bool)
    for value in _PADDING:
        is_kept &= row != value
    rest = row[is_kept]
    # A padding value that is not in `_PADDING` repeats at the end of the row. The values in `_PADDING` are removed
    # first, so that a row whose last tokens are equal gets the same hash with and without padding.
    if len(rest) > 1 and rest[-1] == rest[-2]:
        different = (rest != rest[-1]).nonzero()
        rest = rest[: int(different[-1]) + 1] if len(different) else rest[:0]
    return rest


def reverse_rows(tree: Any, num_rows: int) -> Any:
    """Return a batch with its rows in reverse order. Lists with one entry per row are reversed, too.

    Everything else is unchanged, such as tensors whose first dimension is not `num_rows`.
    """
    if isinstance(tree, torch.Tensor):
        if not tree.ndim or tree.shape[0] != num_rows:
            return tree
        if tree.is_nested:
            return torch.nested.as_nested_tensor(list(reversed(tree.unbind())), layout=tree.layout)
        return tree.flip(0)
    if isinstance(tree, Mapping):
        return _rebuild_mapping(tree, {key: reverse_rows(tree[key], num_rows) for key in tree})
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(reverse_rows(each, num_rows) for each in tree))
    if isinstance(tree, list | tuple):
        is_column = len(tree) == num_rows and not any(isinstance(each, torch.Tensor) for each in tree)
        items = [reverse_rows(each, num_rows) for each in tree]
        return type(tree)(reversed(items) if is_column else items)
    return tree


def _rebuild_mapping(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping with the type of `original`, such as `BatchEncoding`, and the given items."""
    if type(original) is dict:
        return items
    try:
        copied = original.copy()  # type: ignore[attr-defined]
        copied.update(items)
        return copied
    except (AttributeError, TypeError):
        return type(original)(items)  # type: ignore[call-arg]


def find_rows(leaves: Sequence[tuple[str, Any]]) -> int | None:
    """Return the number of rows of a batch, or None if the batch has no tensor with rows.

    The number of rows is the size of the first dimension of the first tensor.

    Args:
        leaves: Pairs of (path, leaf) of the batch, as `walk_tensors` yields them.
    """
    for _, leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            return int(leaf.shape[0])
    return None
