"""Read a checkpoint's files on several threads, and compare each piece with its hash.

A piece is the part of a file that one hash covers. Each piece is hashed while it is in the processor's cache. Files are
read, not mapped. A bad sector in a mapped file would kill the process, while a read raises an error.
"""

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import xxhash

from headway.common.untrusted import open_regular_file
from headway.core.checkpoint.format.entries import HASH_NAME, WrittenFile
from headway.core.checkpoint.format.manifest import Manifest
from headway.core.checkpoint.format.tensors import check_spec
from headway.core.checkpoint.stores.disk import check_file
from headway.core.checkpoint.stores.threads import run_in_order
from headway.core.weights.safetensors_format import TensorOffsets, read_header
from headway.core.weights.tensor_bytes import find_dtype
from headway.errors import CheckpointDamaged, CheckpointError

_BLOCK = 1024 * 1024
"""Bytes per read. A block of this size stays in the processor's cache until it is hashed."""

_MAX_READERS = 8


@dataclass(frozen=True)
class ReadBuffer:
    """Memory into which a range of a file is read.

    Attributes:
        start: Offset in the file at which the range begins.
        memory: Memory to fill.
    """

    start: int
    memory: memoryview


def read_files(
    folder: Path,
    files: Sequence[WrittenFile],
    buffers: Mapping[str, Sequence[ReadBuffer]] | None = None,
    is_verified: bool = True,
) -> None:
    """Read entire files on up to 8 threads, and compare every byte with the hashes. Each thread takes 1 MiB of memory.

    Args:
        folder: Folder of the files.
        files: Files to read, with their hashes.
        buffers: Buffers to fill, by file name, ordered by offset. Default: None, the bytes are not kept.
        is_verified: Whether to compare the bytes with the hashes. False: only files with buffers are read. Default:
            True.

    Raises:
        CheckpointError: If a file does not have its recorded length, or cannot be read.
        CheckpointDamaged: If a file differs from its hashes. The message contains the first such file.
    """
    files_to_read = [written for written in files if is_verified or written.name in (buffers or {})]
    for written in files_to_read:
        check_file(folder / written.name, written)
    _read_pieces(folder, [(written, written.pieces()) for written in files_to_read], buffers, is_verified)


def verify_ranges(folder: Path, manifest: Manifest, ranges: Mapping[str, Sequence[tuple[int, int]]]) -> None:
    """Verify the hashes of all pieces of files that contain the given byte ranges.

    A piece is the part of a file that one hash covers. Other pieces are not read.

    Args:
        folder: Folder of the checkpoint.
        manifest: Manifest with the hashes.
        ranges: Byte ranges by file, as pairs of (begin, end). The end is exclusive.

    Raises:
        CheckpointError: If a file does not have its recorded length, or cannot be read.
        CheckpointDamaged: If a file differs from its hashes. The message contains the first such file.
    """
    pieces_by_file = []
    for file, file_ranges in sorted(ranges.items()):
        written = manifest.files[file]
        pieces_by_file.append((written, [piece for piece in written.pieces() if _overlaps_any(piece, file_ranges)]))
    for written, _ in pieces_by_file:
        check_file(folder / written.name, written)
    _read_pieces(folder, pieces_by_file)


def _read_pieces(
    folder: Path,
    pieces_by_file: Sequence[tuple[WrittenFile, Sequence[tuple[int, int, str]]]],
    buffers: Mapping[str, Sequence[ReadBuffer]] | None = None,
    is_verified: bool = True,
) -> None:
    """Read pieces of files on several threads. The lengths of the files must have been checked.

    Args:
        folder: Folder of the files.
        pieces_by_file: Pairs of (file, pieces to read). A piece is a triple of (offset, length, hash).
        buffers: Buffers to fill, by file name, ordered by offset. Default: None, the bytes are not kept.
        is_verified: Whether to compare each piece with its hash. Default: True.

    Raises:
        CheckpointError: If a file cannot be read, or has become shorter.
        CheckpointDamaged: If a piece differs from its hash.
    """
    # In order, so that the error always names the first bad file.
    tasks = (
        partial(_read_piece, folder / written.name, written, piece, (buffers or {}).get(written.name, ()), is_verified)
        for written, pieces in pieces_by_file
        for piece in pieces
    )
    run_in_order(tasks, max(1, min(_MAX_READERS, os.cpu_count() or 1)))


def _overlaps_any(piece: tuple[int, int, str], ranges: Sequence[tuple[int, int]]) -> bool:
    """Whether a piece of a file overlaps any of the byte ranges. An empty file's piece counts as one byte."""
    start, length, _ = piece
    return any(begin < start + max(1, length) and end > start for begin, end in ranges)


def _read_piece(
    path: Path, written: WrittenFile, piece: tuple[int, int, str], buffers: Sequence[ReadBuffer], is_verified: bool
) -> None:
    """Read one piece of a file into its buffers, and compare it with its hash. Bytes without a buffer are only hashed.

    Args:
        path: Path of the file.
        written: Entry of the file in the manifest.
        piece: Part of the file that one hash covers: (offset, length, hash).
        buffers: Buffers of the file, ordered by offset.
        is_verified: Whether to compare the piece with its hash.

    Raises:
        CheckpointError: If the file cannot be read, or has become shorter.
        CheckpointDamaged: If the piece differs from its hash.
    """
    start, length, recorded_hash = piece
    digest = xxhash.xxh3_128()
    try:
        with open_regular_file(path) as file:
            for offset, view in _iterate_targets(start, start + length, buffers):
                if os.preadv(file.fileno(), [view], offset) != len(view):
                    raise CheckpointError(f"{path} became shorter while it was read")
                if is_verified:
                    digest.update(view)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if is_verified and digest.hexdigest() != recorded_hash:
        raise CheckpointDamaged(
            f"{path} is damaged: its bytes {start:,} to {start + length:,} are not those written ({HASH_NAME} differs)"
        )


def _iterate_targets(start: int, end: int, buffers: Sequence[ReadBuffer]) -> Iterator[tuple[int, memoryview]]:
    """Yield the memory into which to read a range of a file, block by block.

    The memory is part of a buffer if one covers the offset. Otherwise it is a scratch block that is reused.

    Args:
        start: Offset in the file at which the range begins.
        end: Offset at which the range ends.
        buffers: Buffers of the file, ordered by offset.

    Yields:
        Pairs of (offset in the file, memory).
    """
    scratch = memoryview(bytearray(_BLOCK))
    index = bisect_right(buffers, start, key=lambda buffer: buffer.start + len(buffer.memory))
    offset = start
    while offset < end:
        # the first buffer that ends after `offset`
        buffer = buffers[index] if index < len(buffers) else None
        if buffer is None or offset < buffer.start:
            count = min(_BLOCK, end - offset, _BLOCK if buffer is None else buffer.start - offset)
            yield offset, scratch[:count]
        else:
            first = offset - buffer.start
            count = min(_BLOCK, end - offset, len(buffer.memory) - first)
            yield offset, buffer.memory[first : first + count]
            if first + count == len(buffer.memory):
                index += 1
        offset += count


def read_owned(
    folder: Path, manifest: Manifest, names: Sequence[str], is_verified: bool, skips_other_files: bool = False
) -> dict[str, torch.Tensor]:
    """Read tensors into new memory and return them by name. Each tensor must consist of a single chunk.

    Args:
        folder: Folder of the checkpoint.
        manifest: Manifest of the checkpoint.
        names: Names of the tensors.
        is_verified: Whether to compare the bytes of the files with their hashes.
        skips_other_files: Whether to leave out files that contain none of the tensors. If False, the lengths of all
            files are checked, and their hashes if `is_verified` is set. Default: False.

    Raises:
        CheckpointError: If a file differs from the manifest, or lacks what the manifest lists.
    """
    needed = {chunk.file for name in names for chunk in manifest.tensors[name].chunks}
    files = [written for written in manifest.files.values() if not skips_other_files or written.name in needed]
    for written in files:
        check_file(folder / written.name, written)
    try:
        tensors, buffers = _allocate_tensors(folder, manifest, names)
    except CheckpointError:
        if is_verified:  # the file is most likely damaged, and this call raises a clearer error
            read_files(folder, files)
        raise
    files_to_read = [written for written in files if is_verified or written.name in buffers]
    _read_pieces(folder, [(written, written.pieces()) for written in files_to_read], buffers, is_verified)
    return tensors


def _allocate_tensors(
    folder: Path, manifest: Manifest, names: Sequence[str]
) -> tuple[dict[str, torch.Tensor], dict[str, list[ReadBuffer]]]:
    """Return a pair of (new tensors by name, lists of `ReadBuffer` objects by file name).

    The tensors are uninitialized. Reading a file into its buffers, which are views of the tensors, fills them.

    Args:
        folder: Folder of the checkpoint.
        manifest: Manifest of the checkpoint.
        names: Names of tensors that have a single chunk.

    Raises:
        CheckpointError: If a file lacks a tensor, or holds it with another dtype or shape.
    """
    tensors: dict[str, torch.Tensor] = {}
    buffers: dict[str, list[ReadBuffer]] = {}
    headers: dict[str, TensorOffsets] = {}
    paths: dict[str, Path] = {}
    for name in names:
        entry = manifest.tensors[name]
        chunk = entry.chunks[0]
        if chunk.file not in headers:
            paths[chunk.file] = folder / chunk.file
            headers[chunk.file] = read_file_header(paths[chunk.file])
        dtype = find_dtype(entry.dtype)
        start = find_tensor_offset(headers[chunk.file], paths[chunk.file], chunk.key, dtype, entry.shape)
        tensor = tensors[name] = torch.empty(entry.shape, dtype=dtype)
        if tensor.numel():
            flat = tensor.reshape(-1).view(torch.uint8)
            buffers.setdefault(chunk.file, []).append(ReadBuffer(start, memoryview(flat.numpy())))  # type: ignore[arg-type]
    for each in buffers.values():
        each.sort(key=lambda buffer: buffer.start)
    return tensors, buffers


def read_file_header(path: Path) -> TensorOffsets:
    """Return the dtype, shape and offset of each tensor in a file, from its safetensors header.

    Raises:
        CheckpointError: If the file violates the format, or cannot be read.
    """
    with open_regular_file(path) as file:
        return read_header(file, path)[0]


def find_tensor_offset(header: TensorOffsets, path: Path, key: str, dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Return the file offset of a tensor's values, after comparing its dtype and shape with the manifest's.

    Args:
        header: Header of the file.
        path: Path of the file, for messages.
        key: Key of the tensor in the file.
        dtype: Dtype in the manifest.
        shape: Shape in the manifest.

    Raises:
        CheckpointError: If the file lacks the tensor, or its dtype or shape differs.
    """
    spec, start = header.get(key, (None, 0))
    check_spec(spec, dtype, shape, path, key)
    return start
