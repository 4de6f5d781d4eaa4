"""Fingerprints of a few samples, small enough to exchange between ranks.

A sample is a tree of containers. Its fingerprint describes the leaves of this tree: numbers, texts, tensors, arrays
and images. Text, integers and shapes are compared exactly. For floats and pixels, only a few values are compared. Small
deviations are tolerated, because ranks may compute these values on different hardware.

Random augmentation makes samples differ between ranks, even if all ranks read them in the same order. So a difference
in some leaves (such as pixels) proves nothing if other leaves (a label, a text) vary between samples and agree on all
ranks.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from itertools import islice
from typing import Any, NamedTuple

import numpy
import torch

from headway.core.runtime.collectives.tree import is_record

_MAX_LEAVES = 64
_MAX_DEPTH = 6
_MAX_VALUES = 16
_MAX_TEXT = 4096
_TOLERANCE = 1e-2


class SampleLeaf(NamedTuple):
    """One leaf of a sample tree, such as the label.

    Attributes:
        path: Path of the leaf in the sample, such as "[0].shape".
        is_exact: Whether the value must be equal on all ranks. Otherwise it is a tuple of numbers, which are compared
            with a tolerance.
        value: Value of the leaf in a form that can be hashed and exchanged.
    """

    path: str
    is_exact: bool
    value: Any


class SampleColumn(NamedTuple):
    """Values of one leaf of the sample tree, such as the label, in several samples.

    Attributes:
        is_exact: Whether the values must be equal. Otherwise each value is a tuple of numbers, which are compared with
            a tolerance.
        values: One value per sample; None for a sample without this leaf.
    """

    is_exact: bool
    values: tuple[Any, ...]


Fingerprint = dict[str, SampleColumn]
"""Mapping from the path of a leaf in a sample, such as "[0].shape", to the leaf's values in the compared samples."""


class FingerprintComparison(Enum):
    """Result of comparing the fingerprints of several ranks.

    Attributes:
        SAME: No leaf differs by more than the tolerance. Or only floats or pixels differ, as after augmentation, and
            another leaf proves that all ranks read the samples in the same order.
        DIFFERENT: Some leaves differ, and no other leaf proves that all ranks read the samples in the same order.
        UNCLEAR: A text, integer or shape differs, or a rank lacks a leaf, but another leaf proves that all ranks read the
            samples in the same order.
    """

    SAME = "same"
    DIFFERENT = "different"
    UNCLEAR = "unclear"


def pick_samples(samples: Sequence[Any]) -> list[Any]:
    """Return at most 16 of the samples: the first 8 and the last 8, or all if there are no more than 16."""
    half = _MAX_VALUES // 2
    return list(samples) if len(samples) <= _MAX_VALUES else [*samples[:half], *samples[-half:]]


def take_fingerprint(samples: Sequence[Any]) -> Fingerprint:
    """Return the fingerprint of a list of samples.

    It describes at most 64 leaves of each sample. A leaf is a single value in the sample, such as a tensor or a text.
    """
    leaves_by_sample = [
        {leaf.path: leaf for leaf in islice(_describe_leaves(sample, "", 0), _MAX_LEAVES)} for sample in samples
    ]
    fingerprint: Fingerprint = {}
    for path in dict.fromkeys(path for leaves in leaves_by_sample for path in leaves):
        column = [leaves.get(path) for leaves in leaves_by_sample]
        is_exact = all(leaf is None or leaf.is_exact for leaf in column)
        fingerprint[path] = SampleColumn(is_exact, tuple(None if leaf is None else leaf.value for leaf in column))
    return fingerprint


def hash_fingerprint(fingerprint: Fingerprint, ignored_paths: frozenset[str] = frozenset()) -> float:
    """Return a 52-bit hash of a fingerprint, as a float that ranks can exchange without rounding.

    Floats and pixels are hashed exactly, so unequal hashes do not prove that ranks read different samples.

    Args:
        fingerprint: Fingerprint of some samples.
        ignored_paths: Paths of leaves to exclude from the hash. Default: frozenset(), no leaf.
    """
    text = repr([(path, column.values) for path, column in fingerprint.items() if path not in ignored_paths])
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 12)


def compare_fingerprints(fingerprints: Sequence[Fingerprint]) -> tuple[FingerprintComparison, list[str]]:
    """Compare the fingerprints of all ranks.

    Args:
        fingerprints: Fingerprint of each rank's samples, indexed by rank.

    Returns:
        Pair of (result of the comparison, paths of the leaves that differ).
    """
    first = fingerprints[0]
    paths = dict.fromkeys(path for each in fingerprints for path in each)
    differing = [
        path for path in paths if any(not _have_equal_values(first.get(path), each.get(path)) for each in fingerprints)
    ]
    if not differing:
        return FingerprintComparison.SAME, []
    # A leaf that varies between samples and agrees on all ranks proves that the ranks read them in the same order.
    has_same_order = any(len(set(first[path].values)) > 1 for path in first if path not in differing)
    if not has_same_order:
        return FingerprintComparison.DIFFERENT, differing
    if any(path not in each or each[path].is_exact for path in differing for each in fingerprints):
        return FingerprintComparison.UNCLEAR, differing
    return FingerprintComparison.SAME, differing


def describe_difference(fingerprints: Sequence[Fingerprint], path: str) -> str:
    """Return a text that shows one leaf's values on rank 0 and on the first rank whose values differ.

    Args:
        fingerprints: Fingerprints of all ranks, indexed by rank.
        path: Path of a leaf whose values differ between ranks, as `compare_fingerprints` returns it.
    """
    first = fingerprints[0].get(path)
    rank, other = next(
        (index, each.get(path))
        for index, each in enumerate(fingerprints)
        if not _have_equal_values(first, each.get(path))
    )
    return f"{path or 'the sample'} is {_describe_column(first)} on rank 0 and {_describe_column(other)} on rank {rank}"


def _describe_column(column: SampleColumn | None) -> str:
    """Return up to four values of a column as text, or "missing" for None."""
    if column is None:
        return "missing"
    texts = [_describe_value(value) for value in column.values[:4]]
    return ", ".join(texts) + (", ..." if len(column.values) > 4 else "")


def _describe_value(value: Any) -> str:
    """Return a short text for a leaf's value. Of several floats, only the first is shown."""
    if isinstance(value, tuple) and value and isinstance(value[0], float):
        return f"{value[0]:.4g}"
    return str(value)[:40]


def _have_equal_values(one: SampleColumn | None, other: SampleColumn | None) -> bool:
    """Whether two columns have equal values or, if neither must be exact, values within the tolerance."""
    if one is None or other is None or one.is_exact or other.is_exact:
        return one == other
    return len(one.values) == len(other.values) and all(map(_are_close, one.values, other.values))


def _are_close(one: Any, other: Any) -> bool:
    """Whether two values are equal up to rounding. Values other than sequences of numbers must be equal.

    A small number may differ by an amount that is negligible compared with the largest number.
    """
    if not (_are_numbers(one) and _are_numbers(other)) or len(one) != len(other):
        return bool(one == other)
    largest = max([abs(value) for value in (*one, *other) if math.isfinite(value)], default=0.0)
    return all(
        a == b
        or (math.isnan(a) and math.isnan(b))
        or math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE**2 * largest)
        for a, b in zip(one, other)
    )


def _are_numbers(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(each, int | float) for each in value)


# -------------------------------------------------------------------- leaves


def _describe_leaves(node: Any, path: str, depth: int) -> Iterator[SampleLeaf]:
    """Yield the leaves of a sample, down to 6 levels of nesting.

    Args:
        node: Sample, or a part of it.
        path: Path of the part in the sample.
        depth: Nesting level of the part.
    """
    if depth > _MAX_DEPTH:
        return
    if isinstance(node, numpy.generic):
        node = node.item()
    if node is None or isinstance(node, bool | int | str | bytes):
        yield SampleLeaf(path, True, _shorten_text(node))
    elif isinstance(node, float):
        yield SampleLeaf(path, False, (node,))
    elif isinstance(node, torch.Tensor):
        yield from _describe_tensor(node, path)
    elif isinstance(node, numpy.ndarray):
        yield from _describe_array(node, path)
    elif isinstance(node, list | tuple):
        yield from _describe_sequence(node, path, depth)
    elif callable(getattr(node, "getpixel", None)) and hasattr(node, "size"):  # a PIL image
        yield SampleLeaf(path, False, _read_pixels(node))
    else:
        for name, value in islice(_list_members(node), _MAX_LEAVES):
            yield from _describe_leaves(value, f"{path}{name}", depth + 1)


def _list_members(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield pairs of (name, value) for the members of a mapping, a dataclass or another plain object."""
    if isinstance(node, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in node.items())
    elif is_record(node) or (hasattr(node, "__dict__") and not callable(node)):
        yield from ((f".{name}", value) for name, value in vars(node).items())


def _shorten_text(value: Any) -> Any:
    """Shorten a value for a fingerprint: a long text becomes its first characters, its length and a digest.

    The digest covers at most 4096 characters or bytes. A path becomes its file name, because directories can differ
    between machines. Other values are returned unchanged.
    """
    if isinstance(value, str) and "/" in value and len(value) < 1024 and not any(map(str.isspace, value)):
        return value.rsplit("/", 1)[1] or value
    if not isinstance(value, str | bytes) or len(value) <= 64:
        return value
    start = value[:_MAX_TEXT] if isinstance(value, bytes) else value[:_MAX_TEXT].encode(errors="replace")
    return f"{value[:24]!s}... ({len(value)}, {hashlib.blake2b(start, digest_size=6).hexdigest()})"


def _describe_sequence(node: Sequence[Any], path: str, depth: int) -> Iterator[SampleLeaf]:
    """Yield the leaves of a list or tuple. Of a long list of integers, such as token IDs, only evenly spaced items are used.

    Args:
        node: List or tuple.
        path: Path of the sequence in the sample.
        depth: Nesting depth of the sequence.
    """
    if len(node) > _MAX_VALUES and all(type(each) is int for each in node[:_MAX_VALUES]):  # such as token IDs
        yield SampleLeaf(path, True, (len(node), *(node[index] for index in _pick_even_indices(len(node)))))
        return
    for index, value in enumerate(node[:_MAX_LEAVES]):
        yield from _describe_leaves(value, f"{path}[{index}]", depth + 1)
    if len(node) > _MAX_LEAVES:
        yield SampleLeaf(f"len({path})", True, len(node))


def _describe_tensor(tensor: torch.Tensor, path: str) -> Iterator[SampleLeaf]:
    """Yield a tensor's shape, and evenly spaced elements of a dense tensor.

    Floating-point elements and pixels are compared up to rounding, because decoders and CPUs differ. All others must be equal.

    Args:
        tensor: Tensor of a sample.
        path: Path of the tensor in the sample.
    """
    yield SampleLeaf(f"{path}.shape", True, tuple(tensor.shape))
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or not tensor.numel():
        return
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.detach().resolve_conj())
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    values = flat[torch.tensor(_pick_even_indices(len(flat)), device=flat.device)].tolist()
    has_pixels = tensor.dtype is torch.uint8 and tensor.ndim >= 2
    if tensor.is_floating_point() or has_pixels:
        yield SampleLeaf(path, False, tuple(map(float, values)))
    else:
        yield SampleLeaf(path, True, tuple(values))


def _describe_array(array: numpy.ndarray[Any, Any], path: str) -> Iterator[SampleLeaf]:
    """Yield an array's shape, and evenly spaced elements if they are numbers, booleans or text.

    Floating-point elements and pixels are compared up to rounding, because decoders and CPUs differ. All others must be equal.

    Args:
        array: Array of a sample.
        path: Path of the array in the sample.
    """
    yield SampleLeaf(f"{path}.shape", True, tuple(array.shape))
    if not array.size or array.dtype.kind not in "biufSU":
        return
    values = array.reshape(-1)[_pick_even_indices(array.size)].tolist()
    has_pixels = array.dtype == numpy.uint8 and array.ndim >= 2
    if array.dtype.kind == "f" or has_pixels:
        yield SampleLeaf(path, False, tuple(map(float, values)))
    else:
        yield SampleLeaf(path, True, tuple(_shorten_text(value) for value in values))


def _read_pixels(image: Any) -> tuple[float, ...]:
    """Return the width and the height of a PIL image, and the color values of three pixels on its diagonal."""
    width, height = image.size
    values = [float(width), float(height)]
    if not width * height:
        return tuple(values)
    for fraction in (0.2, 0.5, 0.8):
        pixel = image.getpixel((int(width * fraction), int(height * fraction)))
        channels = pixel if isinstance(pixel, tuple) else (pixel,)
        values += map(float, channels)
    return tuple(values)


def _pick_even_indices(length: int) -> list[int]:
    """Return at most 16 evenly spaced indices below `length`, including the first and the last index."""
    if length <= _MAX_VALUES:
        return list(range(length))
    return [number * (length - 1) // (_MAX_VALUES - 1) for number in range(_MAX_VALUES)]
