"""A checkpoint's files read by several threads, piece by piece, each compared with its hash while it is in the processor's cache.

Files are read, not mapped: a bad sector of a mapped file would end the process, where reading gives an error.
"""

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import xxhash

from headway.checkpoint.format.manifest import TITLE, Manifest, WrittenFile
from headway.checkpoint.format.tensors import check_spec
from headway.checkpoint.format.values import dtype_named
from headway.checkpoint.stores.objects import in_order
from headway.common.untrusted import open_regular
from headway.errors import CheckpointDamaged, CheckpointError
from headway.weights.shards import StoredPlaces, read_header

_BLOCK = 1024 * 1024
"""What is read at once stays in the processor's cache until it is hashed."""

_MAX_READERS = 8


@dataclass(frozen=True)
class ReadBuffer:
    """Memory that a part of a file is read into: from `start` on in the file."""

    start: int
    memory: memoryview


def read_files(
    folder: Path,
    files: Sequence[WrittenFile],
    places: Mapping[str, Sequence[ReadBuffer]] | None = None,
    is_verified: bool = True,
) -> None:
    """Read whole files, and compare every byte with what was written; of memory it takes 1 MiB a thread.

    Args:
        folder: where they lie.
        files: what was written.
        places: by file, where its bytes are kept, in order; None: nowhere.
        is_verified: compare; else only what has a place is read.

    Raises:
        CheckpointError: with the first file that is not as it was.
    """
    wanted = [(written, written.pieces()) for written in files if is_verified or written.name in (places or {})]
    _read_pieces(folder, wanted, places, is_verified)


def verify_ranges(folder: Path, manifest: Manifest, ranges: Mapping[str, Sequence[tuple[int, int]]]) -> None:
    """Compare the pieces of files in which these bytes lie with what was written; what lies in others is not read.

    Args:
        folder: where they lie.
        manifest: says what was written.
        ranges: by file, (from, to).

    Raises:
        CheckpointError: with the first file that is not as it was.
    """
    wanted = [
        (manifest.files[file], [piece for piece in manifest.files[file].pieces() if _meets(piece, found)])
        for file, found in sorted(ranges.items())
    ]
    _read_pieces(folder, wanted)


def verify_share(folder: Path, manifest: Manifest, index: int, count: int) -> None:
    """Compare one of `count` shares of all bytes with what was written.

    Raises:
        CheckpointError: with the first file that is not as it was.
    """
    every = [(written, piece) for written in manifest.files.values() for piece in written.pieces()]
    _read_pieces(folder, [(written, [piece]) for written, piece in every[index::count]])


def _read_pieces(
    folder: Path,
    wanted: Sequence[tuple[WrittenFile, Sequence[tuple[int, int, str]]]],
    places: Mapping[str, Sequence[ReadBuffer]] | None = None,
    is_verified: bool = True,
) -> None:
    for written, _ in wanted:
        check_file(folder / written.name, written)
    # In order, so that it is always the first bad file which is named.
    tasks = (
        partial(_read_piece, folder / written.name, written, piece, (places or {}).get(written.name, ()), is_verified)
        for written, pieces in wanted
        for piece in pieces
    )
    in_order(tasks, max(1, min(_MAX_READERS, os.cpu_count() or 1)))


def _meets(piece: tuple[int, int, str], ranges: Sequence[tuple[int, int]]) -> bool:
    start, length, _ = piece
    return any(begin < start + max(1, length) and end > start for begin, end in ranges)


def check_file(path: Path, written: WrittenFile) -> None:
    """Is it a regular file of the length that was written?

    Raises:
        CheckpointError: it is not.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
    if size != written.num_bytes:
        raise CheckpointError(
            f"{path} has {size} bytes; {written.num_bytes} were written. It is truncated, or another file"
        )


def _read_piece(
    path: Path, written: WrittenFile, piece: tuple[int, int, str], places: Sequence[ReadBuffer], is_verified: bool
) -> None:
    start, length, wanted = piece
    digest = xxhash.xxh3_128()
    try:
        with open_regular(path) as file:
            for offset, view in _targets(start, start + length, places):
                if os.preadv(file.fileno(), [view], offset) != len(view):
                    raise CheckpointError(f"{path} became shorter while it was read")
                if is_verified:
                    digest.update(view)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if is_verified and digest.hexdigest() != wanted:
        raise CheckpointDamaged(
            f"{path} is damaged: its bytes {start:,} to {start + length:,} are not those written ({TITLE} differs)"
        )


def _targets(start: int, end: int, places: Sequence[ReadBuffer]) -> Iterator[tuple[int, memoryview]]:
    """(offset, memory) of blocks from `start` to `end`: the places where there are any, else a block that is used again."""
    spare = memoryview(bytearray(_BLOCK))
    # The first one that ends behind.
    low = bisect_right(places, start, key=lambda place: place.start + len(place.memory))
    offset = start
    while offset < end:
        place = places[low] if low < len(places) else None
        if place is None or offset < place.start:
            count = min(_BLOCK, end - offset, _BLOCK if place is None else place.start - offset)
            yield offset, spare[:count]
        else:
            first = offset - place.start
            count = min(_BLOCK, end - offset, len(place.memory) - first)
            yield offset, place.memory[first : first + count]
            low += first + count == len(place.memory)
        offset += count


def read_owned(
    folder: Path, manifest: Manifest, names: Sequence[str], is_verified: bool, is_part: bool = False
) -> dict[str, torch.Tensor]:
    """Tensors of one chunk each, in memory of their own; with `is_verified` after every file of the checkpoint was compared.

    Args:
        folder: the checkpoint.
        manifest: its own.
        names: of the tensors.
        is_verified: compare every file.
        is_part: files that hold none of them are not looked at.

    Raises:
        CheckpointError: a file is not as it was, or lacks what the manifest places there.
    """
    needed = {chunk.file for name in names for chunk in manifest.tensors[name].chunks}
    files = [written for written in manifest.files.values() if not is_part or written.name in needed]
    for written in files:
        check_file(folder / written.name, written)
    try:
        found, places = _allocate(folder, manifest, names)
    except CheckpointError:
        if is_verified:  # most likely damaged, which says more
            read_files(folder, files)
        raise
    read_files(folder, files, places, is_verified)
    return found


def _allocate(
    folder: Path, manifest: Manifest, names: Sequence[str]
) -> tuple[dict[str, torch.Tensor], dict[str, list[ReadBuffer]]]:
    """Tensors without values yet, and by file where they are read from."""
    found: dict[str, torch.Tensor] = {}
    places: dict[str, list[ReadBuffer]] = {}
    headers: dict[str, StoredPlaces] = {}
    for name in names:
        entry = manifest.tensors[name]
        chunk = entry.chunks[0]
        if chunk.file not in headers:
            headers[chunk.file] = header_of(folder / chunk.file)
        dtype = dtype_named(entry.dtype)
        start = find(headers[chunk.file], folder / chunk.file, chunk.key, dtype, entry.shape)
        tensor = found[name] = torch.empty(entry.shape, dtype=dtype)
        if tensor.numel():
            flat = tensor.reshape(-1).view(torch.uint8)
            places.setdefault(chunk.file, []).append(ReadBuffer(start, memoryview(flat.numpy())))  # type: ignore[arg-type]
    for each in places.values():
        each.sort(key=lambda place: place.start)
    return found, places


def header_of(path: Path) -> StoredPlaces:
    """What lies where in a file.

    Raises:
        CheckpointError: it breaks a rule of the format.
    """
    with open_regular(path) as file:
        try:
            return read_header(file, path)[0]
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def find(header: StoredPlaces, path: Path, key: str, dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Where a tensor's bytes begin, which must be as the manifest has it.

    Raises:
        CheckpointError: it is not.
    """
    spec, start = header.get(key, (None, 0))
    check_spec(spec, dtype, shape, path, key)
    return start
