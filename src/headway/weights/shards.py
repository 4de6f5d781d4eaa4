"""Safetensors files: the one table of their dtypes, the one reader of their headers, and the one writer.

A file is an 8-byte little-endian length, a JSON header of that length (`{name: {"dtype", "shape", "data_offsets"}}`, text about
the file under `__metadata__`), and the values without a gap. It is written here, and not by the safetensors library, because that
needs all of a file in memory, refuses tensors that share some, and lets nobody hash the bytes in passing.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from headway.common.object_path import ObjectPath
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
"""torch's dtypes by the format's names."""
CODES = {dtype: code for code, dtype in DTYPES.items()}

MAX_HEADER = 100_000_000
"""The longest header that the safetensors library reads."""
_MAX_AXES, _MAX_BYTES = 64, 2**63 - 1
_BLOCK = 1024 * 1024
"""What is written at once stays in the processor's cache while it is hashed."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes."""
_COUNTED = {DTYPES[code] for code in ("BOOL", "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64")}


@dataclass(frozen=True)
class TensorSpec:
    """What lies, or will be written, under a name."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of it, such as "float32"."""
    return str(dtype).removeprefix("torch.")


# -------------------------------------------------------------------- values as bytes


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a dtype that torch copies: itself, or a view as integers of the same size.

    torch has dtypes that it can store and view, but neither copy nor cast (int4, uint4 and the like).
    """
    dtype = tensor.dtype
    if dtype in _COUNTED or dtype.is_floating_point or dtype.is_complex:
        return tensor
    return tensor.view(INTEGERS[dtype.itemsize])


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's values in order as uint8 on the host; copied only where they lie otherwise, or elsewhere."""
    flat = bits(tensor.detach().resolve_conj().resolve_neg()).contiguous().cpu().reshape(-1)
    if flat.numel() == 1:  # contiguous to torch whatever its stride is, but not to a view as bytes
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Are they alike in dtype and shape, and bit by bit?"""
    is_alike = one.dtype == other.dtype and one.shape == other.shape
    return is_alike and torch.equal(raw_bytes(one), raw_bytes(other))


# -------------------------------------------------------------------- read


StoredPlaces = dict[str, tuple[TensorSpec, int]]
"""By name, what a tensor is and where its values begin in the file."""


def read_header(file: BinaryIO, path: Path) -> tuple[StoredPlaces, dict[str, Any]]:
    """Read a file's header, and check all that it says against the file's length.

    Args:
        file: at its beginning.
        path: for messages.

    Returns:
        what lies where, and text about the file; of anybody's, so any JSON.

    Raises:
        CheckpointError: the file breaks a rule of the format.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little") if size >= 8 else -1
    if not 2 <= length <= min(MAX_HEADER, size - 8):
        raise CheckpointError(f"{path}: no safetensors file; its {size} bytes do not begin with a header's length")
    try:
        header = json.loads(file.read(length), object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError, CheckpointError) as error:
        raise CheckpointError(f"{path}: the header is damaged ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is damaged (no table of tensors)")
    metadata = header.pop("__metadata__", None) or {}
    tensors = {name: _entry(path, name, entry, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for spec, start in sorted(tensors.values(), key=lambda found: (found[1], found[0].num_bytes)):
        if start != end:
            raise CheckpointError(f"{path}: the header is damaged (tensors overlap or leave holes at byte {end})")
        end += spec.num_bytes
    if end != size:
        state = (
            f"truncated: {end - size} bytes are missing"
            if end > size
            else f"{size - end} bytes longer than its header says"
        )
        raise CheckpointError(f"{path}: the file is {state}; copy or download it again")
    return tensors, metadata if isinstance(metadata, dict) else {}


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise CheckpointError("a name occurs twice")
    return found


def _entry(path: Path, name: str, entry: Any, start: int) -> tuple[TensorSpec, int]:
    try:
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        is_sound = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: the header's entry for {name!r} is damaged or of an unknown dtype: {_cut(entry)}"
        ) from error
    if not is_sound or end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(
            f"{path}: the header is damaged: the size of {name!r} does not fit its shape: {_cut(entry)}"
        )
    if len(shape) > _MAX_AXES or math.prod(n for n in shape if n) * dtype.itemsize > _MAX_BYTES:
        raise CheckpointError(f"{path}: the header is damaged: {name!r} has a shape that cannot be: {_cut(entry)}")
    return TensorSpec(shape, dtype), start + begin


def _cut(entry: Any) -> str:
    text = repr(entry)
    return text if len(text) <= 200 else text[:200] + "..."


# -------------------------------------------------------------------- write


def widest_first(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """In an order in which every tensor begins at a multiple of its element's size, so that it can be used where it lies."""
    return dict(sorted(specs.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))


def write_file(
    path: Path,
    specs: Mapping[str, TensorSpec],
    values: Iterable[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
    passing: Callable[[memoryview], None] | None = None,
    is_forced: bool = False,
) -> None:
    """Write a file, one tensor in memory at a time.

    Args:
        path: the file; not replaced atomically.
        specs: all that `values` gives, in the order in which it is to lie.
        values: (name, tensor) pairs on any device, in any order.
        metadata: text about the file.
        passing: is given the bytes as they are written; in the file's order, where the values come in it.
        is_forced: return when it is on the disk.

    Raises:
        OSError: the disk is full, or not writable.
        CheckpointError: a dtype that the format lacks, or other values than `specs` says.
    """
    header, starts = _header(specs, metadata or {})
    left = set(specs)
    with path.open("wb", buffering=0) as file:
        _put(file, memoryview(header), passing)
        for name, tensor in values:
            spec = specs.get(name)
            if spec is None or (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
                raise CheckpointError(
                    f"{name} came as {list(tensor.shape)} {tensor.dtype} to be written, wanted: {spec}"
                )
            if file.tell() != starts[name]:
                file.seek(starts[name])
            _put_blocks(file, tensor, passing)
            left.discard(name)
            del tensor  # before the next one comes
        if left:
            raise CheckpointError(f"{path}: no values came for {', '.join(sorted(left)[:5])}")
        if is_forced and not isinstance(path, ObjectPath):
            os.fsync(file.fileno())


def _header(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The file's first bytes, and where each tensor begins."""
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
            f"a tensor's name holds {error.object[error.start]!r}, which UTF-8 does not have"
        ) from error
    text += b" " * (-(8 + len(text)) % 64)  # the values begin at a multiple of 64 bytes
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + start for name, start in offsets.items()}


def _put_blocks(file: BinaryIO, tensor: torch.Tensor, passing: Callable[[memoryview], None] | None) -> None:
    data = memoryview(raw_bytes(tensor).numpy())  # type: ignore[arg-type]
    for start in range(0, tensor.nbytes, _BLOCK):
        _put(file, data[start : start + _BLOCK], passing)


def _put(file: BinaryIO, view: memoryview, passing: Callable[[memoryview], None] | None) -> None:
    if passing is not None:
        passing(view)
    while view:
        view = view[file.write(view) :]
