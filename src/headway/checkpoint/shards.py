"""Safetensors files written as a stream and read by memory map: hashed in passing, on the disk when done.

The format is that of the safetensors library (an 8-byte little-endian length, a JSON header, the data), so any tool
reads these files. They are written here because that library needs the whole shard in memory, and hashes nothing.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from headway.checkpoint.manifest import PIECE, Written
from headway.checkpoint.tensors import raw_bytes
from headway.errors import CheckpointError

_BLOCK = 1024 * 1024
"""What is read or written at once stays in the processor's cache until it is hashed."""

CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64",
}  # fmt: skip


def write_shard(path: Path, tensors: Sequence[tuple[str, torch.Tensor]]) -> Written:
    """Write the tensors to `path`, force them to the disk, and say what was written.

    Memory: one tensor's copy at a time for those that are not contiguous on the host; none for the others.

    Raises:
        OSError: the disk is full, or not writable.
    """
    header = _header(tensors)
    digests = PieceHashes()
    with open(path, "wb", buffering=0) as file:
        for view in chain([memoryview(header)], *(_blocks(tensor) for _, tensor in tensors)):
            digests.update(view)
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())
    return digests.written(path.name)


class PieceHashes:
    """The hashes of a file's pieces, of bytes that come in order."""

    def __init__(self) -> None:
        self._current = xxhash.xxh3_128()
        self._digests: list[str] = []
        self._length = 0

    def update(self, view: memoryview) -> None:
        """Hash this too."""
        while view:
            if self._length and self._length % PIECE == 0:
                self._next()
            part = view[: PIECE - self._length % PIECE]
            self._current.update(part)
            self._length += len(part)
            view = view[len(part) :]

    def _next(self) -> None:
        self._digests.append(self._current.hexdigest())
        self._current = xxhash.xxh3_128()

    def written(self, name: str) -> Written:
        """The file, now that all of it has come."""
        self._next()
        return Written(name, self._length, tuple(self._digests))


def _header(tensors: Sequence[tuple[str, torch.Tensor]]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        code = CODES.get(tensor.dtype)
        # A type that the format lacks is kept as its bytes; the manifest knows what they are.
        shape = list(tensor.shape) if code else [num_bytes]
        entries[name] = {"dtype": code or "U8", "shape": shape, "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _blocks(tensor: torch.Tensor) -> Iterator[memoryview]:
    if not tensor.numel():
        return
    data = memoryview(raw_bytes(tensor).numpy())  # type: ignore[arg-type]
    for start in range(0, len(data), _BLOCK):
        yield data[start : start + _BLOCK]


def describe(path: Path, name: str) -> Written:
    """What lies in a file that somebody else wrote, forced to the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    digests = PieceHashes()
    view = memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(view):
            digests.update(view[:count])
    return digests.written(name)


def prove_shard(path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Open a file as a load will, and compare what it says of its tensors; their values are hashed, and not read.

    Raises:
        CheckpointError: it could not be loaded.
    """
    try:
        with safe_open(path, framework="pt") as file:
            for name, tensor in tensors:
                found = file.get_slice(name)
                code = CODES.get(tensor.dtype)
                wanted = list(tensor.shape) if code else [tensor.numel() * tensor.element_size()]
                if (found.get_dtype(), list(found.get_shape())) != (code or "U8", wanted):
                    raise CheckpointError(f"{path} was written and does not hold {name!r} as it is")
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} was written and cannot be read: {error}") from error


def read_shard(path: Path, wanted: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> dict[str, torch.Tensor]:
    """The tensors of those names as views of the mapped file; pages are read when they are used.

    Raises:
        CheckpointError: the file is no such file, or holds other tensors than those.
    """
    found: dict[str, torch.Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            present = set(file.keys())
            for name, dtype, shape in wanted:
                if name not in present:
                    raise CheckpointError(f"{path} lacks the tensor {name!r} that the manifest places there")
                found[name] = _shaped(file.get_tensor(name), dtype, shape, f"{path}: {name}")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
    return found


def _shaped(tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], where: str) -> torch.Tensor:
    if tensor.dtype != dtype:
        is_raw = dtype not in CODES and tensor.dtype == torch.uint8
        if not is_raw or tensor.numel() != torch.Size(shape).numel() * dtype.itemsize:
            raise CheckpointError(f"{where} is of {tensor.dtype}, the manifest says {dtype}")
        return tensor.clone().view(dtype).reshape(tuple(shape))
    if tuple(tensor.shape) != tuple(shape):
        raise CheckpointError(f"{where} has the shape {tuple(tensor.shape)}, the manifest says {tuple(shape)}")
    return tensor
