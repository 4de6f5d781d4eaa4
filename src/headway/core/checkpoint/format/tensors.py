"""Write, hash, verify and map the files of a checkpoint that hold dense tensors.

Files are in safetensors format. They are hashed piece by piece while they are written, verified when complete, and
read by memory map. A piece is the part of a file that one hash covers.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path

import torch
import xxhash

from headway.common.object_path import THREADS, ObjectPath
from headway.common.untrusted import open_regular_file
from headway.core.checkpoint.format.entries import PIECE, WrittenFile
from headway.core.weights.files import StoredTensor
from headway.core.weights.parallel_writer import ParallelWriter, count_threads
from headway.core.weights.ranged_file import RangedFile
from headway.core.weights.safetensors_format import CODES, read_header
from headway.core.weights.tensor_bytes import TensorSpec, get_raw_bytes
from headway.errors import CheckpointError

_BLOCK = 1024 * 1024
"""Bytes per read. A block of this size stays in the processor's cache until it is hashed."""
_PIECE_SIZES: list[int] = [2**power for power in range(14, 24)]
"""Possible numbers of bytes per hash of files in object stores. The last resort is `PIECE`."""
_MAX_HASHES = 2**18
"""Maximum number of hashes in all files of an object store with one name pattern."""
_STORED_AS_BYTES = {"C64", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
"""Dtypes that safetensors added after version 2 of the checkpoint format was fixed. They are stored as bytes."""


def write_shards(
    folder: Path, files: Mapping[str, Sequence[tuple[str, torch.Tensor]]], num_files: int = 1
) -> list[WrittenFile]:
    """Write safetensors files, flush them to the disk with fsync, and return their lengths and hashes in order.

    Several threads are used for object stores, and for disks if there are at least 64 MiB to write. Each header is checked
    with `check_header`. `ParallelWriter` documents how much memory this takes.

    Args:
        folder: Folder of the files.
        files: Pairs of (tensor name, values), by file name.
        num_files: Number of files that all ranks write with this name pattern. In object stores, one hash covers 8 KiB
            times `num_files`, rounded up to a power of two and at least 16 KiB, so that a rank that loads its part
            reads few extra bytes. It covers more where all files would otherwise have more than 2^18 hashes. Default:
            1.

    Raises:
        OSError: If the disk is full or not writable.
        CheckpointError: If a load would refuse the header of a written file.
    """
    written_files: list[WrittenFile] = []
    pending: list[tuple[str, RangedFile, int]] = []  # (name, file, bytes per hash)
    num_bytes = sum(tensor.nbytes for tensors in files.values() for _, tensor in tensors)
    is_object = isinstance(folder, ObjectPath)
    with ParallelWriter(THREADS if is_object else count_threads(num_bytes)) as writer:
        for name, tensors in files.items():
            specs = {key: get_stored_spec(tensor.dtype, tensor.shape) for key, tensor in tensors}
            piece = _choose_piece(specs.values(), num_files) if is_object else PIECE
            check = partial(_check_written_header, tensors)
            values = _list_values(specs, tensors)
            file = writer.write(folder / name, specs, values, piece=piece, syncs_to_disk=True, on_written=check)
            pending.append((name, file, piece))
    # The lengths and hashes are complete once the writer has closed.
    for name, file, piece in pending:
        written_files.append(WrittenFile(name, file.num_bytes, tuple(file.digests), piece))
    return written_files


def _choose_piece(specs: Iterable[TensorSpec], num_files: int) -> int:
    """Return the number of bytes that one hash covers in a file in an object store.

    It is at least 8 KiB times `num_files`, and so large that all files together have at most 2^18 hashes. It is the
    smallest such power of two from 16 KiB to 8 MiB, or else 16 MiB.

    Args:
        specs: Shapes and dtypes of the file's tensors.
        num_files: Number of files of about this size that all ranks write.
    """
    max_hashes = max(1, _MAX_HASHES // num_files)
    num_bytes = sum(spec.num_bytes for spec in specs)
    for size in _PIECE_SIZES:
        if size >= 2**13 * num_files and num_bytes <= size * max_hashes:
            return size
    return PIECE


def _list_values(
    specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield pairs of (name, tensor), with the raw bytes of each tensor whose dtype the file format lacks."""
    for name, tensor in tensors:
        yield name, tensor if specs[name].dtype == tensor.dtype else get_raw_bytes(tensor)


def _check_written_header(tensors: Sequence[tuple[str, torch.Tensor]], file: RangedFile) -> None:
    check_header(file.path, tensors)


def check_header(path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise `CheckpointError` if the header of a written file does not list the given tensors as a load expects them.

    The values are not read back.

    Args:
        path: Written file.
        tensors: Pairs of (name, values) that the file should hold.

    Raises:
        CheckpointError: If a load would refuse the header.
    """
    with open_regular_file(path) as file:
        stored, _ = read_header(file, path)
    for name, tensor in tensors:
        if name not in stored or stored[name][0] != get_stored_spec(tensor.dtype, tensor.shape):
            raise CheckpointError(f"{path} was written and does not hold {name!r} as it is")


def get_stored_spec(dtype: torch.dtype, shape: Sequence[int]) -> TensorSpec:
    """Return the dtype and shape with which a file stores a tensor.

    A dtype that the file format lacks is stored as a 1-D uint8 tensor. Then only the manifest contains the original
    dtype and shape.

    Args:
        dtype: Dtype of the tensor.
        shape: Shape of the tensor.
    """
    if CODES.get(dtype, "C64") in _STORED_AS_BYTES:
        return TensorSpec((prod(shape) * dtype.itemsize,), torch.uint8)
    return TensorSpec(tuple(shape), dtype)


def hash_file(path: Path, name: str) -> WrittenFile:
    """Hash a file that a hook has written, and return its length and hashes. On a disk, flush it with fsync.

    Args:
        path: File to read.
        name: File name, relative to the checkpoint's folder.

    Raises:
        CheckpointError: If the path is not a regular file. Reading another kind of file, such as a pipe, might never
            end.
    """
    digests = PieceHashes()
    view = memoryview(bytearray(_BLOCK))
    with open_regular_file(path) as file:
        if not isinstance(path, ObjectPath):
            os.fsync(file.fileno())
        while count := file.readinto(view):  # type: ignore[attr-defined]
            digests.update(view[:count])
    return digests.make_entry(name)


class PieceHashes:
    """Hasher for a file that is written in order. Each hash covers one piece of the file.

    Args:
        piece: Number of bytes that one hash covers.
    """

    def __init__(self, piece: int = PIECE) -> None:
        self._piece = piece
        self._current_hash = xxhash.xxh3_128()
        self._digests: list[str] = []
        self._length = 0

    def update(self, view: memoryview) -> None:
        """Hash the next bytes of the file."""
        while view:
            if self._length and self._length % self._piece == 0:
                self._finish_piece()
            part = view[: self._piece - self._length % self._piece]
            self._current_hash.update(part)
            self._length += len(part)
            view = view[len(part) :]

    def _finish_piece(self) -> None:
        """Record the hash of the piece that is complete, and start the next one."""
        self._digests.append(self._current_hash.hexdigest())
        self._current_hash = xxhash.xxh3_128()

    def make_entry(self, name: str) -> WrittenFile:
        """Return the manifest's entry for the file, with its length and hashes.

        Call it after the last byte has been hashed.

        Args:
            name: File name, relative to the checkpoint's folder.
        """
        self._finish_piece()
        return WrittenFile(name, self._length, tuple(self._digests), self._piece)


def get_view(
    stored: Mapping[str, StoredTensor], path: Path, name: str, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """Return a tensor of a mapped file as a view, or as a copy if its dtype is stored as bytes.

    Args:
        stored: Tensors of the mapped file, by key.
        path: Path of the file, for messages.
        name: Key of the tensor in the file.
        dtype: Expected dtype.
        shape: Expected shape.

    Raises:
        CheckpointError: If the file has no tensor under that key, or one of another dtype or shape.
    """
    check_spec(stored.get(name), dtype, shape, path, name)
    tensor = stored[name].tensor()
    # Bytes can begin at any offset in the file. The values of a larger dtype must be aligned, so they are copied.
    return tensor if tensor.dtype == dtype else tensor.clone().view(dtype).reshape(tuple(shape))


def check_spec(stored_spec: TensorSpec | None, dtype: torch.dtype, shape: Sequence[int], path: Path, name: str) -> None:
    """Raise `CheckpointError` if a file's header does not match the manifest's entry of a tensor.

    Args:
        stored_spec: Dtype and shape in the header, or None if the header lacks the tensor.
        dtype: Dtype in the manifest.
        shape: Shape in the manifest.
        path: Path of the file, for messages.
        name: Key of the tensor.

    Raises:
        CheckpointError: If the header lacks the tensor, or its dtype or shape differs.
    """
    if stored_spec is None:
        raise CheckpointError(f"{path} lacks the tensor {name!r} that the manifest places there")
    expected_spec = get_stored_spec(dtype, shape)
    if (stored_spec.shape, stored_spec.dtype) != (expected_spec.shape, expected_spec.dtype):
        raise CheckpointError(
            f"{path}: {name} is {stored_spec.dtype} of {stored_spec.shape}, where the manifest has {dtype} of {tuple(shape)}"
        )
