"""The checkpoint format, version 3: what a manifest says, and how it is written and checked.

A checkpoint is a folder of safetensors files and one `manifest.json`; it exists when the manifest does. The manifest
names every tensor by its logical name (e.g. `model/0/` and the bare module's name), its global shape and dtype, and
the chunks it lies in; every file with its length and the XXH3-128 of each 16 MiB of it; tied names; and as JSON what is no
tensor::

    {"format": "headway checkpoint", "version": 3, "sha256": <of content>, "content": {
       "tensors": {name: {"shape", "dtype", "chunks": [{"offsets", "shape", "file", "key"}]
                                         or "grid": {"sizes", "file", "parts"}}},
       "files": {file: {"bytes", "xxh3_128": [one a piece], "piece"?}}, "aliases": {name: name}, "state": ..., "about": ...}}

The hashes are there to find accidental damage: bad sectors, torn copies, files mixed up. Who can write to the folder can
write a fitting manifest as well, whatever the algorithm. Pieces let several threads read one file. Where ranks read ranges over a
network, pieces are smaller ("piece": their bytes), so that comparing takes little more than a rank needs.

Grids (`ChunkGrid`) are tensors that many ranks wrote, each a box of a regular split.

What a manifest says, asked for by type and range: a value that is not what belongs there is an error that names its place.

A manifest may be damaged, of another program, or made to do harm. Who reads it through `TypedReader` never meets a wrong type later,
when objects have been changed already.
"""

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, TypeVar

from headway.checkpoint.format.chunks import MOST, ChunkGrid, ChunkGridReader, read_count
from headway.checkpoint.format.chunks import TensorChunk as Chunk
from headway.checkpoint.format.foreign import MANIFEST as MANIFEST
from headway.checkpoint.format.foreign import explain
from headway.common.object_path import ObjectPath
from headway.common.untrusted import UNREADABLE, read_regular
from headway.errors import CheckpointError

T = TypeVar("T")

FORMAT, VERSION = "headway checkpoint", 3
ALGORITHM, TITLE = "xxh3_128", "XXH3-128"
"""What files are hashed with."""

PIECE = 16 * 2**20
"""Bytes of a file that have a hash of their own."""

MAX_BYTES = 256 * 2**20
"""The longest manifest that is written or read: it is parsed in memory, of which it takes a multiple."""

_MAX_AXES, _MAX_CUT = 64, 6
_NAMES_BY_BYTES = {
    16: "complex128",
    8: "float64 int64 uint64 complex64",
    4: "float32 int32 uint32 complex32",
    2: "float16 bfloat16 int16 uint16 bits16",
    1: "int8 uint8 bool float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 "
    "bits8 bits1x8 bits2x4 bits4x2 int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7",
}
ITEM_BYTES = {name: size for size, names in _NAMES_BY_BYTES.items() for name in names.split()}
"""The dtypes a checkpoint may hold, by torch's names, and their bytes."""


@dataclass(frozen=True)
class WrittenFile:
    """A file that is on the disk.

    Attributes:
        name: in its folder.
        num_bytes: its length.
        digests: of each piece of its bytes, in hexadecimal.
        piece: bytes of a piece.
    """

    name: str
    num_bytes: int
    digests: tuple[str, ...]
    piece: int = PIECE

    def pieces(self) -> list[tuple[int, int, str]]:
        """(where it begins, its length, its hash) of each piece."""
        starts = range(0, max(1, self.num_bytes), self.piece)
        return [(start, min(self.piece, self.num_bytes - start), digest) for start, digest in zip(starts, self.digests)]

    def encode(self) -> dict[str, Any]:
        """As JSON."""
        piece = {} if self.piece == PIECE else {"piece": self.piece}
        return {"bytes": self.num_bytes, ALGORITHM: list(self.digests), **piece}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor: its global shape, its dtype's name, and the chunks that make it up."""

    shape: tuple[int, ...]
    dtype: str
    chunks: Sequence[Chunk]

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def encode(self) -> dict[str, Any]:
        """As JSON."""
        about = {"shape": list(self.shape), "dtype": self.dtype}
        if isinstance(self.chunks, ChunkGrid):
            return {**about, "grid": self.chunks.encode()}
        return {**about, "chunks": [dict(vars(chunk)) for chunk in self.chunks]}


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        tensors: entries by logical name.
        files: what was written, by file name.
        aliases: tied names, and the name that holds their values.
        state: everything that is not a tensor, as `values.encode` made it.
        about: counters, world and versions: what a reader may want to know before it loads.
    """

    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, WrittenFile]
    aliases: Mapping[str, str] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The manifest as the bytes of `manifest.json`.

        Raises:
            CheckpointError: what it holds cannot be written as JSON, or is too long.
        """
        content = {
            "tensors": {name: entry.encode() for name, entry in self.tensors.items()},
            "files": {name: written.encode() for name, written in self.files.items()},
            "aliases": dict(self.aliases),
            "state": dict(self.state),
            "about": dict(self.about),
        }
        try:
            whole = {"format": FORMAT, "version": VERSION, "sha256": _digest(content), "content": content}
            data = (json.dumps(whole, indent=1, allow_nan=False) + "\n").encode()
        except (ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(f"the state cannot be written as JSON: {type(error).__name__}: {error}") from error
        if len(data) > MAX_BYTES:
            raise CheckpointError(
                f"the manifest would have {len(data):,} bytes, where {MAX_BYTES:,} are the most; let state_dict() return long "
                "lists of numbers as tensors or arrays"
            )
        return data

    @classmethod
    def decode(cls, data: bytes, where: str = MANIFEST) -> "Manifest":
        """Read and check the bytes of a `manifest.json`.

        Raises:
            CheckpointError: it is none, of another version, or not what was written.
        """
        try:
            whole = json.loads(data)
            if not isinstance(whole, dict) or whole.get("format") != FORMAT:
                raise CheckpointError(f"{where} is not a manifest of a Headway checkpoint")
            version = whole.get("version")
            if version != VERSION:
                raise CheckpointError(f"{where} is of version {version!r} of the format; this Headway reads {VERSION}")
            content = whole.get("content")
            if _digest(content) != whole.get("sha256"):
                raise CheckpointError(f"{where} is damaged: its content is not what was written (SHA-256 differs)")
            return _read_content(content)
        except CheckpointError:
            raise
        except (*UNREADABLE, RecursionError) as error:
            raise CheckpointError(f"{where} cannot be read: {type(error).__name__}: {error}") from error

    @property
    def sha256(self) -> str:
        """The hash of the whole manifest: two checkpoints with one hash are one checkpoint."""
        return hashlib.sha256(self.encode()).hexdigest()

    def moved(self, folder: str) -> "Manifest":
        """The same with its files in a folder below."""

        def entry(known: TensorEntry) -> TensorEntry:
            chunks = known.chunks
            if isinstance(chunks, ChunkGrid):
                chunks = ChunkGrid(chunks.key, chunks.sizes, f"{folder}/{chunks.file}", chunks.parts)
            else:
                chunks = tuple(replace(each, file=f"{folder}/{each.file}") for each in chunks)
            return replace(known, chunks=chunks)

        files = {f"{folder}/{name}": replace(each, name=f"{folder}/{name}") for name, each in self.files.items()}
        return replace(self, tensors={name: entry(each) for name, each in self.tensors.items()}, files=files)

    def num_bytes(self) -> int:
        """The length of all files but the manifest."""
        return sum(written.num_bytes for written in self.files.values())


def _digest(content: Any) -> str:
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    ).hexdigest()


def _read_content(content: Any) -> Manifest:
    files = {_file_name(name): _read_file(name, entry) for name, entry in content["files"].items()}
    grids = ChunkGridReader(files)
    tensors = {name: _read_entry(name, entry, files, grids) for name, entry in content["tensors"].items()}
    _check_room(tensors, files)
    aliases = {str(name): str(target) for name, target in content["aliases"].items()}
    for name, target in aliases.items():
        if target not in tensors or name in tensors:
            raise CheckpointError(
                f"the tied name {name!r} stands for {target!r}, which is not a tensor of its own here"
            )
    state, about = content["state"], content["about"]
    if not isinstance(state, dict) or not isinstance(about, dict):
        raise CheckpointError("the manifest's state and about must be objects")
    return Manifest(tensors, files, aliases, state, about)


def _read_file(name: str, entry: dict[str, Any]) -> WrittenFile:
    num_bytes, found, piece = read_count(entry["bytes"]), entry[ALGORITHM], read_count(entry.get("piece", PIECE), 1)
    digests, num_pieces = tuple(found) if isinstance(found, list) else (), max(1, -(-num_bytes // piece))
    if len(digests) != num_pieces or not all(isinstance(each, str) for each in digests):
        raise CheckpointError(f"the manifest has {len(digests)} hashes of {name!r}, which has {num_pieces} pieces")
    return WrittenFile(name, num_bytes, digests, piece)


def _read_entry(
    name: str, entry: dict[str, Any], files: Mapping[str, WrittenFile], grids: ChunkGridReader
) -> TensorEntry:
    if entry["dtype"] not in ITEM_BYTES:
        raise CheckpointError(f"the tensor {name!r} is of the unknown dtype {entry['dtype']!r}")
    shape = _shape(entry["shape"], ITEM_BYTES[entry["dtype"]])
    if "grid" in entry:
        return TensorEntry(shape, entry["dtype"], grids.read(name, entry["grid"], shape))
    chunks = tuple(
        Chunk(
            tuple(map(read_count, c["offsets"])), tuple(map(read_count, c["shape"])), _text(c["file"]), _text(c["key"])
        )
        for c in entry["chunks"]
    )
    for chunk in chunks:
        if chunk.file not in files:
            raise CheckpointError(f"the tensor {name!r} lies in {chunk.file!r}, which the manifest does not list")
        fits = len(chunk.offsets) == len(chunk.shape) == len(shape) and all(
            start + size <= total for start, size, total in zip(chunk.offsets, chunk.shape, shape)
        )
        if not fits:
            raise CheckpointError(f"a chunk of {name!r} at {chunk.offsets} of {chunk.shape} lies outside {shape}")
    if not _make_up(chunks, shape):
        raise CheckpointError(f"the chunks of {name!r} do not make up its shape {shape}")
    return TensorEntry(shape, entry["dtype"], chunks)


def _shape(value: Any, item_bytes: int) -> tuple[int, ...]:
    """The shape of a tensor that can be: torch counts bytes in 63 bits."""
    shape = tuple(map(read_count, value))
    if len(shape) > _MAX_AXES or prod(size for size in shape if size) * item_bytes > MOST:
        raise CheckpointError(
            f"the manifest has a tensor of {len(shape)} axes and {prod(shape)} values, which cannot be"
        )
    return shape


def _make_up(chunks: Sequence[Chunk], shape: Sequence[int]) -> bool:
    """Do the chunks, which lie inside the shape, make it up, each value of it once?

    They do where their corners, counted with alternating signs, are those of the whole: the corners are the mixed
    derivative of how often a place is covered, which determines it. That takes time in proportion to the chunks, however
    they lie.
    """
    boxes = [chunk for chunk in chunks if prod(chunk.shape)]
    if len(boxes) <= 1:
        return sum(prod(box.shape) for box in boxes) == prod(shape)
    cut = [axis for axis, size in enumerate(shape) if any(box.shape[axis] != size for box in boxes)]
    if len(cut) > _MAX_CUT:
        raise CheckpointError(f"a tensor is cut along {len(cut)} axes, where {_MAX_CUT} are the most")
    corners: Counter[tuple[int, ...]] = Counter()
    whole = Chunk((0,) * len(shape), tuple(shape), "", "")
    for box, times in [(whole, -1), *((box, 1) for box in boxes)]:
        ends = [((box.offsets[axis], 1), (box.offsets[axis] + box.shape[axis], -1)) for axis in cut]
        for corner in product(*ends):
            corners[tuple(place for place, _ in corner)] += times * prod(sign for _, sign in corner)
    return not any(corners.values())


def _check_room(tensors: Mapping[str, TensorEntry], files: Mapping[str, WrittenFile]) -> None:
    """Every chunk has bytes of its own: what is read takes no more memory than the files have bytes.

    The boxes of grids have names and files of their own by construction, and are looked at altogether.
    """
    room = {name: written.num_bytes for name, written in files.items()}
    taken: set[tuple[str, str]] = set()
    in_grids = {name for name, entry in tensors.items() if isinstance(entry.chunks, ChunkGrid)}
    if sum(tensors[name].num_bytes for name in in_grids) > sum(room.values()):
        raise CheckpointError("the manifest places more bytes in its files than they have")
    for entry in (entry for name, entry in tensors.items() if name not in in_grids):
        for chunk in entry.chunks:
            if (chunk.file, chunk.key) in taken or chunk.key in in_grids:
                raise CheckpointError(f"the manifest uses {chunk.key!r} in {chunk.file!r} for two tensors")
            taken.add((chunk.file, chunk.key))
            room[chunk.file] -= prod(chunk.shape) * ITEM_BYTES[entry.dtype]
            if room[chunk.file] < 0:
                raise CheckpointError(
                    f"the manifest places more in {chunk.file!r} than its {files[chunk.file].num_bytes:,} bytes hold"
                )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise CheckpointError(f"the manifest has {value!r} where a name belongs")
    return value


def _file_name(name: str) -> str:
    parts = PurePosixPath(name).parts
    is_inside = parts and name == "/".join(parts) and not name.startswith("/") and ".." not in parts
    if not is_inside or name == MANIFEST or "\0" in name:
        raise CheckpointError(f"the manifest names the file {name!r}, which does not lie in its folder")
    os.fsencode(name)  # a ValueError, where no file can be called that
    return name


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder; its other files are not looked at.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = folder / MANIFEST
    if isinstance(path, ObjectPath):
        found = path.client.keep(path.key)
        if found is None:
            raise CheckpointError(explain(folder))
        return Manifest.decode(found[0], str(path))
    if not os.path.lexists(path):
        raise CheckpointError(explain(folder))
    try:
        data = read_regular(path, MAX_BYTES)
    except CheckpointError as error:
        raise CheckpointError(f"{folder} is not a committed checkpoint: {error}") from error
    return Manifest.decode(data, str(path))


LARGEST = 2**53
"""The largest count: as many as a float counts exactly, in which ranks tell them each other."""


class TypedReader:
    """A value, and where it is.

    Args:
        value: JSON, or what `values.decode` made of it.
        where: its place, for messages.
    """

    def __init__(self, value: Any, where: str) -> None:
        self.value = value
        self._where = where

    def refuse(self, wanted: str) -> NoReturn:
        """Say that something else belongs here.

        Raises:
            CheckpointError: always.
        """
        text = repr(self.value)
        text = text if len(text) <= 80 else text[:80] + "..."
        raise CheckpointError(f"the manifest's {self._where} is {text}, where {wanted} belongs")

    def replaced(self, value: Any) -> "TypedReader":
        """Another value in this place, such as what it was decoded to."""
        return TypedReader(value, self._where)

    def whole(self, least: int = 0, most: int = LARGEST) -> int:
        """A whole number in that range."""
        value = self.value
        if type(value) is not int or not least <= value <= most:
            self.refuse(f"a whole number from {least} to {most}")
        return value

    def number(self, least: float = -math.inf, most: float = math.inf) -> float:
        """A finite number in that range, whole or not."""
        value = self.value
        # A whole number beyond all floats has no value as one.
        is_sound = type(value) in (int, float) and -1e308 <= value <= 1e308
        if not is_sound or not least <= value <= most:
            self.refuse(
                "a finite number" + (f" from {least} to {most}" if (least, most) != (-math.inf, math.inf) else "")
            )
        return float(value)

    def text(self) -> str:
        """Text."""
        return self._of(str, "text")

    def flag(self) -> bool:
        """True or False."""
        return self._of(bool, "true or false")

    def _of(self, kind: type[T], wanted: str) -> T:
        if not isinstance(self.value, kind):
            self.refuse(wanted)
        return self.value

    @property
    def is_none(self) -> bool:
        """Is there nothing?"""
        return self.value is None

    def items(self, count: int | None = None) -> "list[TypedReader]":
        """What a list (or tuple) holds; `count`: as many as it must have."""
        value = self.value
        if not isinstance(value, list | tuple):
            self.refuse("a list")
        if count is not None and len(value) != count:
            self.refuse(f"a list of {count}")
        return [TypedReader(item, f"{self._where}[{index}]") for index, item in enumerate(value)]

    def table(self) -> "dict[str, TypedReader]":
        """What a table holds, by its names."""
        value = self.value
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            self.refuse("a table of names")
        return {name: TypedReader(item, f"{self._where}.{name}") for name, item in value.items()}

    def mapping(self) -> dict[Any, Any]:
        """A dict of any keys."""
        return self._of(dict, "a dict")

    def __getitem__(self, name: str) -> "TypedReader":
        """What must stand under that name."""
        found = self.get(name)
        if found is None:
            raise CheckpointError(f"the manifest's {self._where} lacks {name!r}")
        return found

    def get(self, name: str) -> "TypedReader | None":
        """What stands under that name; None where nothing does."""
        value = self._of(dict, "a table of names")
        return TypedReader(value[name], f"{self._where}.{name}") if name in value else None

    def given(self, *names: str) -> "Iterator[TypedReader]":
        """What stands under those of the names that are there and say something."""
        for name in names:
            found = self.get(name)
            if found is not None and not found.is_none:
                yield found
