"""A checkpoint's files: safetensors, hashed in pieces as they are written, proved when done, and read by memory map."""

import os
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path

import torch
import xxhash

from headway.checkpoint.format.manifest import PIECE, WrittenFile
from headway.common.untrusted import open_regular
from headway.errors import CheckpointError
from headway.weights.files import StoredTensor, map_safetensors
from headway.weights.shards import CODES, TensorSpec, raw_bytes, write_file

_BLOCK = 1024 * 1024
"""What is read at once stays in the processor's cache until it is hashed."""
_LATER = {"C64", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
"""What came to safetensors after version 2 of our format was fixed, and is kept as bytes as it was then."""


def stored_as(dtype: torch.dtype, shape: Sequence[int]) -> TensorSpec:
    """How a file holds such a tensor: as it is, or as its bytes, where only the manifest knows what they are."""
    if CODES.get(dtype, "C64") in _LATER:
        return TensorSpec((prod(shape) * dtype.itemsize,), torch.uint8)
    return TensorSpec(tuple(shape), dtype)


def write_shard(path: Path, tensors: Sequence[tuple[str, torch.Tensor]]) -> WrittenFile:
    """Write the tensors to `path`, force them to the disk, and say what was written.

    Memory: one tensor's copy at a time for those that are not contiguous on the host; none for the others.

    Raises:
        OSError: the disk is full, or not writable.
    """
    specs = {name: stored_as(tensor.dtype, tensor.shape) for name, tensor in tensors}
    digests = PieceHashes()
    values = ((name, tensor if specs[name].dtype == tensor.dtype else raw_bytes(tensor)) for name, tensor in tensors)
    write_file(path, specs, values, passing=digests.update, is_forced=True)
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

    def written(self, name: str) -> WrittenFile:
        """The file, now that all of it has come."""
        self._next()
        return WrittenFile(name, self._length, tuple(self._digests))


def describe(path: Path, name: str) -> WrittenFile:
    """What lies in a file that somebody else wrote, forced to the disk.

    Raises:
        CheckpointError: it is not a regular file, and may never end.
    """
    digests = PieceHashes()
    view = memoryview(bytearray(_BLOCK))
    with open_regular(path) as file:
        os.fsync(file.fileno())
        while count := os.readv(file.fileno(), [view]):
            digests.update(view[:count])
    return digests.written(name)


def prove_shard(path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Open a file as a load will, and compare what it says of its tensors; their values are hashed, and not read.

    Raises:
        CheckpointError: it could not be loaded.
    """
    stored, _ = map_safetensors(path)
    for name, tensor in tensors:
        found = stored.get(name)
        if found is None or TensorSpec(found.shape, found.dtype) != stored_as(tensor.dtype, tensor.shape):
            raise CheckpointError(f"{path} was written and does not hold {name!r} as it is")


def view_of(
    stored: Mapping[str, StoredTensor], path: Path, name: str, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """A tensor of a mapped file, as a view of it.

    Raises:
        CheckpointError: the file holds another one, or none of that name.
    """
    if name not in stored:
        raise CheckpointError(f"{path} lacks the tensor {name!r} that the manifest places there")
    check_spec(TensorSpec(stored[name].shape, stored[name].dtype), dtype, shape, f"{path}: {name}")
    tensor = stored[name].tensor()
    # Bytes may begin anywhere in the file, a dtype's values may not.
    return tensor if tensor.dtype == dtype else tensor.clone().view(dtype).reshape(tuple(shape))


def check_spec(found: TensorSpec, dtype: torch.dtype, shape: Sequence[int], where: str) -> None:
    """Does a file hold what the manifest says?

    Raises:
        CheckpointError: it does not.
    """
    if found != stored_as(dtype, shape):
        raise CheckpointError(
            f"{where} is {found.dtype} of {found.shape}, where the manifest has {dtype} of {tuple(shape)}"
        )
