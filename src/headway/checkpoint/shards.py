"""Safetensors files written as a stream and read by memory map: hashed in passing, on the disk when done.

The format is that of the safetensors library (an 8-byte little-endian length, a JSON header, the data), so any tool
reads these files. They are written here because that library needs the whole shard in memory, and hashes nothing.
"""

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from queue import SimpleQueue

import torch
from safetensors import SafetensorError, safe_open

from headway.checkpoint.manifest import Written
from headway.errors import CheckpointError

_BLOCK = 16 * 1024 * 1024
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
    with _Hash() as digest, open(path, "wb", buffering=0) as file:
        for view in chain([memoryview(header)], *(_blocks(tensor) for _, tensor in tensors)):
            digest.update(view)
            length += len(view)
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())
    return Written(path.name, length, digest.hexdigest())


class _Hash:
    """SHA-256 on a thread beside the writing, which takes about as long; neither holds the interpreter lock.

    No executor: those refuse work while Python shuts down, when a save behind the loop may still be written.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._views: SimpleQueue[memoryview | None] = SimpleQueue()
        self._has_room = threading.Semaphore(2)  # what is not contiguous is copied, block by block
        self._thread = threading.Thread(target=self._run, name="headway-hash", daemon=True)

    def __enter__(self) -> "_Hash":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._views.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (view := self._views.get()) is not None:
            self._digest.update(view)
            self._has_room.release()

    def update(self, view: memoryview) -> None:
        """Hash this too."""
        self._has_room.acquire()
        self._views.put(view)

    def hexdigest(self) -> str:
        """Of everything; after the block."""
        return self._digest.hexdigest()


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
        digest = hashlib.file_digest(file, "sha256") if hasattr(hashlib, "file_digest") else hashlib.sha256(file.read())
        return Written(name, file.tell(), digest.hexdigest())


def check_file(path: Path, num_bytes: int, sha256: str) -> None:
    """Read the whole file once and compare it with what was written.

    Raises:
        CheckpointError: it is missing, shorter or longer, or its bytes differ.
    """
    digest = hashlib.sha256()
    try:
        size = path.stat().st_size
        if size != num_bytes:
            raise CheckpointError(
                f"{path} has {size} bytes; {num_bytes} were written. It is truncated, or another file"
            )
        with open(path, "rb", buffering=0) as file:
            buffer = bytearray(min(_BLOCK, max(1, num_bytes)))
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if digest.hexdigest() != sha256:
        raise CheckpointError(f"{path} is damaged: its bytes are not those that were written (SHA-256 differs)")


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
