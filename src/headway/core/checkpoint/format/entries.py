"""Entries of a manifest for files and tensors, and the checks of entries that were read from an untrusted manifest."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import PurePosixPath
from typing import Any

from headway.core.checkpoint.format.chunks import MAX_COUNT, ChunkGrid, ChunkGridReader, read_count, read_counts
from headway.core.checkpoint.format.chunks import TensorChunk as Chunk
from headway.core.checkpoint.format.foreign import MANIFEST as MANIFEST
from headway.errors import CheckpointError

ALGORITHM, HASH_NAME = "xxh3_128", "XXH3-128"
"""Hash algorithm for files: its key in the manifest (`ALGORITHM`) and its name in messages (`HASH_NAME`)."""
PIECE = 16 * 2**20
"""Number of bytes that one hash covers in files on a disk. In object stores, it can be smaller."""
_MAX_AXES, _MAX_CUT_AXES = 64, 6
_NAMES_BY_BYTES = {
    16: "complex128",
    8: "float64 int64 uint64 complex64",
    4: "float32 int32 uint32 complex32",
    2: "float16 bfloat16 int16 uint16 bits16",
    1: "int8 uint8 bool float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 "
    "bits8 bits1x8 bits2x4 bits4x2 int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7",
}
ITEM_BYTES = {name: size for size, names in _NAMES_BY_BYTES.items() for name in names.split()}
"""Bytes per element, by the name of the torch dtype, for all dtypes that a checkpoint can contain."""


@dataclass(frozen=True)
class WrittenFile:
    """File of a checkpoint that has been written, with its length and hashes.

    The hashes detect accidental damage: bad sectors, incomplete copies, mixed-up files. They do not protect against an
    attacker, because anyone with write access can also write a matching manifest. Hashes per piece allow several
    threads to read one file. In object stores, pieces can be smaller, so that verification reads little more than a
    rank needs.

    Attributes:
        name: File name, relative to the checkpoint's folder.
        num_bytes: Length in bytes.
        digests: Hexadecimal hash of each piece of the file, in order.
        piece: Number of bytes that one hash covers. The last piece can be shorter.
    """

    name: str
    num_bytes: int
    digests: tuple[str, ...]
    piece: int = PIECE

    def pieces(self) -> list[tuple[int, int, str]]:
        """Return a list of (offset, length, hash) triples, one for each part of the file that one hash covers."""
        starts = range(0, max(1, self.num_bytes), self.piece)
        return [(start, min(self.piece, self.num_bytes - start), digest) for start, digest in zip(starts, self.digests)]

    def encode(self) -> dict[str, Any]:
        """Return the manifest's entry for the file as JSON values."""
        piece = {} if self.piece == PIECE else {"piece": self.piece}
        return {"bytes": self.num_bytes, ALGORITHM: list(self.digests), **piece}


@dataclass(frozen=True)
class TensorEntry:
    """Manifest entry of a tensor.

    A chunk is a rectangular block of the tensor that is stored in one file. A `ChunkGrid` describes a tensor that is
    split regularly, with one chunk written by each of many ranks.

    Attributes:
        shape: Shape of the full tensor.
        dtype: Name of its torch dtype, such as "float32".
        chunks: Blocks of the tensor that are each stored in one file, as a list or a `ChunkGrid`.
    """

    shape: tuple[int, ...]
    dtype: str
    chunks: Sequence[Chunk]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's values in bytes."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def encode(self) -> dict[str, Any]:
        """Return the entry as JSON values."""
        about = {"shape": list(self.shape), "dtype": self.dtype}
        if isinstance(self.chunks, ChunkGrid):
            return {**about, "grid": self.chunks.encode()}
        return {**about, "chunks": [dict(vars(chunk)) for chunk in self.chunks]}


def read_file_entry(name: str, entry: dict[str, Any]) -> WrittenFile:
    """Return a file's size and hashes from its untrusted entry in the manifest.

    Args:
        name: Name of the file.
        entry: JSON object of the entry.

    Raises:
        CheckpointError: If the number of hashes does not fit the size.
    """
    num_bytes, piece = read_count(entry["bytes"]), read_count(entry.get("piece", PIECE), 1)
    num_pieces = max(1, -(-num_bytes // piece))
    digests = tuple(entry[ALGORITHM]) if isinstance(entry[ALGORITHM], list) else ()
    if len(digests) != num_pieces or not set(map(type, digests)) <= {str}:
        blocks = "1 block" if num_pieces == 1 else f"{num_pieces} blocks"
        raise CheckpointError(f"the manifest has {len(digests)} hashes of {name!r}, which has {blocks}")
    return WrittenFile(name, num_bytes, digests, piece)


def read_tensor_entry(
    name: str, entry: dict[str, Any], files: Mapping[str, WrittenFile], grids: ChunkGridReader
) -> TensorEntry:
    """Return the entry of one tensor, after checking that its chunks are in listed files and cover its shape exactly once.

    Args:
        name: Name of the tensor.
        entry: JSON object of the entry. It is untrusted.
        files: Files of the checkpoint by name.
        grids: Reader for entries that describe a regular grid of chunks.

    Raises:
        CheckpointError: If the dtype is unknown, or a check fails.
    """
    if entry["dtype"] not in ITEM_BYTES:
        raise CheckpointError(f"the tensor {name!r} is of the unknown dtype {entry['dtype']!r}")
    shape = _decode_shape(entry["shape"], ITEM_BYTES[entry["dtype"]])
    if "grid" in entry:
        return TensorEntry(shape, entry["dtype"], grids.read(name, entry["grid"], shape))
    chunks = tuple(map(_read_chunk, entry["chunks"]))
    for chunk in chunks:
        if chunk.file not in files:
            raise CheckpointError(f"the tensor {name!r} is in {chunk.file!r}, which the manifest does not list")
    if len(chunks) == 1 and chunks[0].shape == shape and chunks[0].offsets == (0,) * len(shape):
        return TensorEntry(shape, entry["dtype"], chunks)  # most tensors have one chunk
    for chunk in chunks:
        fits = len(chunk.offsets) == len(chunk.shape) == len(shape) and all(
            start + size <= total for start, size, total in zip(chunk.offsets, chunk.shape, shape)
        )
        if not fits:
            raise CheckpointError(f"a chunk of {name!r} at {chunk.offsets} of {chunk.shape} is outside of {shape}")
    if not _do_chunks_cover(chunks, shape):
        raise CheckpointError(f"the chunks of {name!r} do not make up its shape {shape}")
    return TensorEntry(shape, entry["dtype"], chunks)


def _read_chunk(entry: Any) -> Chunk:
    """Return a chunk of a tensor from its untrusted JSON entry.

    Raises:
        CheckpointError: If the file or the key is not a string, or the offsets or the shape are no lists of counts.
    """
    file, key = entry["file"], entry["key"]
    for name in (file, key):
        if not isinstance(name, str):
            raise CheckpointError(f"the manifest has {name!r} where a name belongs")
    return Chunk(read_counts(entry["offsets"]), read_counts(entry["shape"]), file, key)


def _decode_shape(value: Any, item_bytes: int) -> tuple[int, ...]:
    """Return a decoded shape, after checking that a tensor of this shape has fewer than 2^63 bytes, as torch requires.

    Args:
        value: Shape in the manifest.
        item_bytes: Bytes per element.

    Raises:
        CheckpointError: If the tensor would be too large, or the shape has more than 64 dims or an invalid length.
        TypeError: If the value is not iterable.
    """
    shape = read_counts(value)
    # The limit applies to empty tensors too, because their strides are products of the nonzero dims.
    if len(shape) > _MAX_AXES or prod(filter(None, shape)) * item_bytes > MAX_COUNT:
        raise CheckpointError(
            f"the manifest has a tensor of {len(shape)} axes and {prod(shape)} values, which cannot be"
        )
    return shape


def _do_chunks_cover(chunks: Sequence[Chunk], shape: Sequence[int]) -> bool:
    """Whether the chunks cover each element of a tensor exactly once. Every chunk must be inside the tensor's shape.

    The corners of all chunks are counted with alternating signs. The counts equal those of the full tensor's corners if
    and only if the chunks cover it exactly once. The time is proportional to the number of chunks.

    Raises:
        CheckpointError: If the tensor is cut along more than 6 dims. The time grows exponentially with their number.
    """
    chunks_with_values = [chunk for chunk in chunks if prod(chunk.shape)]
    if len(chunks_with_values) <= 1:
        return sum(prod(box.shape) for box in chunks_with_values) == prod(shape)
    cut_axes = [axis for axis, size in enumerate(shape) if any(box.shape[axis] != size for box in chunks_with_values)]
    if len(cut_axes) > _MAX_CUT_AXES:
        raise CheckpointError(f"a tensor is sharded along {len(cut_axes)} axes; the maximum is {_MAX_CUT_AXES}")
    corners: Counter[tuple[int, ...]] = Counter()
    full_tensor = Chunk((0,) * len(shape), tuple(shape), "", "")
    for box, times in [(full_tensor, -1), *((box, 1) for box in chunks_with_values)]:
        ends = [((box.offsets[axis], 1), (box.offsets[axis] + box.shape[axis], -1)) for axis in cut_axes]
        for corner in product(*ends):
            corners[tuple(coordinate for coordinate, _ in corner)] += times * prod(sign for _, sign in corner)
    return not any(corners.values())


def check_shared_bytes(tensors: Mapping[str, TensorEntry], files: Mapping[str, WrittenFile]) -> None:
    """Raise `CheckpointError` if two chunks have the same key in a file, or a file is smaller than its chunks together.

    The check limits the memory for reading all chunks to the total size of the files. Chunks of grids have unique names
    and files by construction, so only their total size is checked.

    Raises:
        CheckpointError: If chunks share bytes, or need more bytes than the files have.
    """
    free_bytes = {name: written.num_bytes for name, written in files.items()}
    used_keys: set[tuple[str, str]] = set()
    in_grids = {name for name, entry in tensors.items() if isinstance(entry.chunks, ChunkGrid)}
    if sum(tensors[name].num_bytes for name in in_grids) > sum(free_bytes.values()):
        raise CheckpointError("the manifest places more bytes in its files than they have")
    for name, entry in tensors.items():
        if name in in_grids:
            continue
        for chunk in entry.chunks:
            if (chunk.file, chunk.key) in used_keys or chunk.key in in_grids:
                raise CheckpointError(f"the manifest uses {chunk.key!r} in {chunk.file!r} for two tensors")
            used_keys.add((chunk.file, chunk.key))
            free_bytes[chunk.file] -= prod(chunk.shape) * ITEM_BYTES[entry.dtype]
            if free_bytes[chunk.file] < 0:
                raise CheckpointError(
                    f"the manifest places more in {chunk.file!r} than its {files[chunk.file].num_bytes:,} bytes hold"
                )


def check_file_name(name: str) -> str:
    """Return the name of a file in a manifest, after checking that it is a plain relative path inside the folder.

    Raises:
        CheckpointError: If it is not.
        ValueError: If no file can have this name.
    """
    parts = PurePosixPath(name).parts
    is_inside = parts and name == "/".join(parts) and not name.startswith("/") and ".." not in parts
    if not is_inside or name == MANIFEST or "\0" in name:
        raise CheckpointError(f"the manifest names the file {name!r}, which is not in its folder")
    os.fsencode(name)  # raises ValueError for an impossible file name
    return name
