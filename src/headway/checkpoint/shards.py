"""Safetensors files written as a stream and read by memory map: hashed in passing, on the disk when done.

The format is that of the safetensors library (an 8-byte little-endian length, a JSON header, the data), so any tool
reads these files. They are written here because that library needs the whole shard in memory, and hashes nothing.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from headway.checkpoint.manifest import ALGORITHM, TITLES, Written
from headway.errors import CheckpointError

_BLOCK = 256 * 1024
"""What is read or written at once stays in the processor's cache until it is hashed."""

_CODES = {
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
    length = 0
    digest = new_hash(ALGORITHM)
    with open(path, "wb", buffering=0) as file:
        for view in chain([memoryview(header)], *(_blocks(tensor) for _, tensor in tensors)):
            digest.update(view)
            length += len(view)
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())
    return Written(path.name, length, digest.hexdigest())


def new_hash(algorithm: str) -> Any:
    """A hash object of that algorithm; neither kind holds the interpreter lock over a block."""
    return hashlib.sha256() if algorithm == "sha256" else xxhash.xxh3_128()


def _header(tensors: Sequence[tuple[str, torch.Tensor]]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        code = _CODES.get(tensor.dtype)
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
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu().reshape(-1).view(torch.uint8)
    data = memoryview(flat.numpy())  # type: ignore[arg-type]
    for start in range(0, len(data), _BLOCK):
        yield data[start : start + _BLOCK]


def describe(path: Path, name: str) -> Written:
    """What lies in a file that somebody else wrote, forced to the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    num_bytes, digest = _read_through(path, ALGORITHM)
    return Written(name, num_bytes, digest)


def check_file(path: Path, written: Written) -> None:
    """Read the whole file once and compare it with what was written, in 256 KiB of memory.

    Raises:
        CheckpointError: it is missing, shorter or longer, or its bytes differ.
    """
    try:
        size = path.stat().st_size
        if size != written.num_bytes:
            raise CheckpointError(
                f"{path} has {size} bytes; {written.num_bytes} were written. It is truncated, or another file"
            )
        _, digest = _read_through(path, written.algorithm)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if digest != written.digest:
        raise CheckpointError(
            f"{path} is damaged: its bytes are not those that were written ({TITLES[written.algorithm]} differs)"
        )


def _read_through(path: Path, algorithm: str) -> tuple[int, str]:
    """(length, hash) of a file. It is read, not mapped: a bad sector of a mapped file would end the process."""
    digest, length = new_hash(algorithm), 0
    view = memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(view):
            digest.update(view[:count])
            length += count
    return length, digest.hexdigest()


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
        raise CheckpointError(f"{path} is no readable safetensors file: {error}") from error
    return found


def _shaped(tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], where: str) -> torch.Tensor:
    if tensor.dtype != dtype:
        is_raw = dtype not in _CODES and tensor.dtype == torch.uint8
        if not is_raw or tensor.numel() != torch.Size(shape).numel() * dtype.itemsize:
            raise CheckpointError(f"{where} is of {tensor.dtype}, the manifest says {dtype}")
        return tensor.clone().view(dtype).reshape(tuple(shape))
    if tuple(tensor.shape) != tuple(shape):
        raise CheckpointError(f"{where} has the shape {tuple(tensor.shape)}, the manifest says {tuple(shape)}")
    return tensor
