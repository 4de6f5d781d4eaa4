"""The safetensors format: names of dtypes, and functions that read headers and write files.

A file consists of an 8-byte little-endian length, a JSON header of that length, and the values without gaps. The
header is `{name: {"dtype", "shape", "data_offsets"}}`, with the file's metadata under `__metadata__`.

The safetensors library is not used to write files. It needs the whole file in memory, refuses tensors that share
memory, and does not expose the bytes for hashing.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from headway.common.garbage import pause_garbage_collection
from headway.core.weights.tensor_bytes import TensorSpec, get_raw_bytes
from headway.errors import CheckpointError

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
"""Mapping from dtype names in the safetensors format to torch dtypes."""
CODES = {dtype: code for code, dtype in DTYPES.items()}
"""Mapping from torch dtypes to their names in the safetensors format."""

MAX_HEADER = 100_000_000
"""Maximum header length in bytes that the safetensors library accepts."""
_MAX_DIMS = 64
"""Maximum number of dims of a tensor. torch supports no more."""
_MAX_BYTES = 2**63 - 1
"""Maximum size of a tensor in bytes. torch computes sizes with 64-bit signed integers."""
BLOCK = 1024 * 1024
"""Bytes per write. A block of this size stays in the processor's cache while it is hashed."""


# -------------------------------------------------------------------- read


TensorOffsets = dict[str, tuple[TensorSpec, int]]
"""Mapping from each tensor's name to a pair of (shape and dtype, file offset of its values)."""


@pause_garbage_collection()
def read_header(file: BinaryIO, path: Path) -> tuple[TensorOffsets, dict[str, Any]]:
    """Read a safetensors file's header, and check it against the file's length.

    Args:
        file: Opened file.
        path: Path of the file, for messages.

    Returns:
        Pair of (shape, dtype and file offset of each tensor by name, metadata). The metadata is an untrusted JSON
            object.

    Raises:
        CheckpointError: If the file violates the format, cannot be read, or its length differs from the one that the
            header implies.
    """
    try:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little") if size >= 8 else -1
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise CheckpointError(f"{path}: no safetensors file; its {size} bytes do not begin with a header's length")
        text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        header = json.loads(text, object_pairs_hook=_refuse_duplicates)
    except (ValueError, RecursionError, CheckpointError) as error:
        raise CheckpointError(f"{path}: the header is damaged ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is damaged (no table of tensors)")
    metadata = header.pop("__metadata__", None) or {}
    tensors = {name: _parse_entry(path, name, entry, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for start, num_bytes in sorted([(start, spec.num_bytes) for spec, start in tensors.values()]):
        if start != end:
            raise CheckpointError(f"{path}: the header is damaged (tensors overlap or leave holes at byte {end})")
        end += num_bytes
    if end != size:
        if end > size:
            problem = f"truncated: {end - size} bytes are missing"
        else:
            problem = f"{size - end} bytes longer than its header states"
        raise CheckpointError(f"{path}: the file is {problem}; copy or download it again")
    return tensors, metadata if isinstance(metadata, dict) else {}


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict. Raise `CheckpointError` if a key occurs twice."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise CheckpointError("a name occurs twice")
    return table


def _parse_entry(path: Path, name: str, entry: Any, start: int) -> tuple[TensorSpec, int]:
    """Return the shape and dtype of a tensor, and the file offset of its values, from an entry of a file's header.

    Args:
        path: Path of the file, for messages.
        name: Name of the tensor.
        entry: Entry of the header. It is untrusted.
        start: File offset to which the entry's offsets refer.

    Raises:
        CheckpointError: If the entry is damaged, or its dtype is unknown.
    """
    try:
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, begin, end)
        is_sound = set(map(type, numbers)) == {int} and min(numbers) >= 0
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: the header's entry for {name!r} is damaged or of an unknown dtype: {_shorten_entry(entry)}"
        ) from error
    if not is_sound or end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(
            f"{path}: the header is damaged: the size of {name!r} does not fit its shape: {_shorten_entry(entry)}"
        )
    if len(shape) > _MAX_DIMS or math.prod(filter(None, shape)) * dtype.itemsize > _MAX_BYTES:
        raise CheckpointError(
            f"{path}: the header is damaged: {name!r} has a shape that cannot be: {_shorten_entry(entry)}"
        )
    return TensorSpec(shape, dtype), start + begin


def _shorten_entry(entry: Any) -> str:
    """Return an entry of a header as text for an error message, with at most 200 characters."""
    text = repr(entry)
    return text if len(text) <= 200 else text[:200] + "..."


# -------------------------------------------------------------------- write


def order_widest_first(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return tensor specs in order of element size, largest first, which aligns each tensor in the file.

    Each tensor then begins at a multiple of its element size. Without this alignment, a tensor cannot be used directly
    in a mapped file.

    Args:
        specs: Shape and dtype by name.
    """
    return dict(sorted(specs.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))


def write_file(
    path: Path,
    specs: Mapping[str, TensorSpec],
    values: Iterable[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file, with one tensor in memory at a time.

    Args:
        path: File to write. It is not replaced atomically.
        specs: Shape and dtype of each tensor, in the order of the file.
        values: Pairs of (name, tensor), on any device and in any order. Each tensor in `specs` must occur.
        metadata: Entries for the metadata in the file's header, in addition to `{"format": "pt"}`. Default: None, no
            other entries.

    Raises:
        OSError: If the disk is full or not writable. An incomplete file can be left.
        CheckpointError: If the format lacks a dtype, or a name cannot be encoded. Also if the values differ from
            `specs`, which can leave an incomplete file.
    """
    header, starts = encode_header(specs, metadata or {})
    unwritten = set(specs)
    try:
        # Small tensors are collected in the buffer and written together. Larger blocks bypass it.
        with path.open("wb", buffering=BLOCK) as file:
            _write_all(file, memoryview(header))
            for name, tensor in values:
                spec = specs.get(name)
                if spec is None or (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
                    raise CheckpointError(
                        f"{name} is to be written as {list(tensor.shape)} {tensor.dtype}, but the file was planned with {spec}"
                    )
                if file.tell() != starts[name]:
                    file.seek(starts[name])
                _write_all(file, memoryview(get_raw_bytes(tensor).numpy()))  # type: ignore[arg-type]
                unwritten.discard(name)
                del tensor  # free it before the next one is produced
            if unwritten:
                raise CheckpointError(f"{path}: no values were passed for {', '.join(sorted(unwritten)[:5])}")
    except OSError as error:
        _add_path(error, path)
        raise


@contextlib.contextmanager
def add_path_to_errors(path: Path) -> Iterator[None]:
    """Context manager that adds the path of a file to each `OSError` without a path, such as one from `os.write`.

    The error is then raised again.
    """
    try:
        yield
    except OSError as error:
        _add_path(error, path)
        raise


def _add_path(error: OSError, path: Path) -> None:
    """Add a path to an error of the operating system that does not name one."""
    if error.filename is None and error.errno is not None:
        error.filename = str(path)


def encode_header(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Return the first bytes of a safetensors file, up to the values, and the file offset of each tensor.

    Args:
        specs: Shape and dtype of each tensor, in the order of the file.
        metadata: Entries for the metadata in the file's header, in addition to `{"format": "pt"}`.

    Raises:
        CheckpointError: If the format lacks a dtype, or a name cannot be encoded.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    offsets, end = dict[str, int](), 0
    for name, spec in specs.items():
        if spec.dtype not in CODES:
            raise CheckpointError(f"{name} is of {spec.dtype}, which the safetensors format does not have")
        offsets[name], begin = end, end
        end += spec.num_bytes
        entries[name] = {"dtype": CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
    try:
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"a tensor's name contains {error.object[error.start]!r}, which UTF-8 does not have"
        ) from error
    text += b" " * (-(8 + len(text)) % 64)  # so that the values begin at a multiple of 64 bytes
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + start for name, start in offsets.items()}


def _write_all(file: BinaryIO, view: memoryview) -> None:
    """Write all bytes, because one write to a file can be incomplete."""
    while view:
        view = view[file.write(view) :]
