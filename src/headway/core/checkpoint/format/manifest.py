"""Manifest of a checkpoint, format version 3: its content, and how it is written and checked.

A checkpoint is a folder of safetensors files and one `manifest.json`. It is complete once the manifest exists::

    {"format": "headway checkpoint", "version": 3, "sha256": <of content>, "content": {
       "tensors": {name: {"shape", "dtype", "chunks": [{"offsets", "shape", "file", "key"}]
                                         or "grid": {"sizes", "file", "parts"}}},
       "files": {file: {"bytes", "xxh3_128": [one per piece], "piece"?}},
       "aliases": {name: name}, "state": ..., "about": ...}}

`entries.py` describes the entries of "tensors" and "files". Tensors have logical names, such as `model/0/` and the name
in the model without wrappers. "aliases" holds the names of tied tensors, and "state" all state that is not a tensor.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from headway.common.garbage import pause_garbage_collection
from headway.common.object_path import ObjectPath
from headway.common.untrusted import PARSE_ERRORS, read_regular_file
from headway.core.checkpoint.format.chunks import ChunkGrid, ChunkGridReader
from headway.core.checkpoint.format.entries import (
    TensorEntry,
    WrittenFile,
    check_file_name,
    check_shared_bytes,
    read_file_entry,
    read_tensor_entry,
)
from headway.core.checkpoint.format.foreign import MANIFEST as MANIFEST
from headway.core.checkpoint.format.foreign import explain_path
from headway.errors import CheckpointError

FORMAT, VERSION = "headway checkpoint", 3
MAX_BYTES = 256 * 2**20
"""Maximum length of a manifest in bytes, for writing and reading. Parsing it takes several times that much memory."""


@dataclass(frozen=True)
class Manifest:
    """Content of a checkpoint's `manifest.json`.

    Attributes:
        tensors: Entries by logical name, such as `model/0/` plus the name in the model.
        files: Written files by file name.
        aliases: Names of tied tensors, each mapped to the name of the tensor that holds their values.
        state: All state that is not a tensor, as `values.encode_value` returns it.
        about: Counters, world size and versions, for programs that inspect a checkpoint before loading it.
    """

    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, WrittenFile]
    aliases: Mapping[str, str] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the bytes of `manifest.json`. The result is cached.

        Raises:
            CheckpointError: If the content cannot be written as JSON, or is too long.
        """
        return self._data

    def read_back(self) -> "Manifest":
        """Return the manifest as a load would decode it from the encoded bytes. The result is cached.

        Raises:
            CheckpointError: If a load would refuse the bytes.
        """
        return self._read

    def does_round_trip(self) -> bool:
        """Whether decoding the encoded bytes returns exactly this manifest again.

        Parts that `decode` does not interpret, such as the state, are compared by their hash.

        Raises:
            CheckpointError: If a load would refuse the bytes.
        """
        back = self.read_back()
        return (back.tensors, back.files, back.aliases) == (self.tensors, self.files, self.aliases)

    @cached_property
    def _read(self) -> "Manifest":
        """Manifest as a load would decode it from the encoded bytes."""
        return Manifest.decode(self._data)

    def _encode_content(self) -> dict[str, Any]:
        """Return the manifest's content as JSON values."""
        return {
            "tensors": {name: entry.encode() for name, entry in self.tensors.items()},
            "files": {name: written.encode() for name, written in self.files.items()},
            "aliases": dict(self.aliases),
            "state": dict(self.state),
            "about": dict(self.about),
        }

    @cached_property
    @pause_garbage_collection()
    def _data(self) -> bytes:
        """Bytes of the manifest file: JSON that contains the content and its hash.

        Raises:
            CheckpointError: If the content has no JSON form, or the file would exceed `MAX_BYTES`.
        """
        content = self._encode_content()
        try:
            sha256 = vars(self)["sha256"] = vars(self).get("sha256") or _compute_digest(content)
            document = {"format": FORMAT, "version": VERSION, "sha256": sha256, "content": content}
            # `indent` would disable the C encoder of Python's json. With it, 10,000 parameters took seconds.
            data = (json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n").encode()
        except (ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(f"the state cannot be written as JSON: {type(error).__name__}: {error}") from error
        if len(data) > MAX_BYTES:
            raise CheckpointError(
                f"the manifest would have {len(data):,} bytes, where {MAX_BYTES:,} are the most; let state_dict() return long "
                "lists of numbers as tensors or arrays"
            )
        return data

    @classmethod
    @pause_garbage_collection()
    def decode(cls, data: bytes, where: str = MANIFEST) -> "Manifest":
        """Return a manifest, decoded from the bytes of a `manifest.json` and checked.

        Args:
            data: Bytes of the file.
            where: Path of the file, for messages.

        Raises:
            CheckpointError: If the bytes are not a manifest, have another format version, or are damaged.
        """
        try:
            document = json.loads(data)
            if not isinstance(document, dict) or document.get("format") != FORMAT:
                raise CheckpointError(f"{where} is not a manifest of a Headway checkpoint")
            version = document.get("version")
            if version != VERSION:
                raise CheckpointError(f"{where} is of version {version!r} of the format; this Headway reads {VERSION}")
            content = document.get("content")
            if _compute_digest(content) != document.get("sha256"):
                raise CheckpointError(f"{where} is damaged: its content is not what was written (SHA-256 differs)")
            manifest = _read_content(content)
            vars(manifest)["sha256"] = document["sha256"]  # the value of the cached property
            return manifest
        except CheckpointError:
            raise
        except (*PARSE_ERRORS, RecursionError) as error:
            raise CheckpointError(f"{where} cannot be read: {type(error).__name__}: {error}") from error

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the content, in hexadecimal. Checkpoints with equal values have equal content."""
        return _compute_digest(self._encode_content())

    def with_files_in(self, folder: str) -> "Manifest":
        """Return a copy of the manifest in which all files are in a subfolder.

        Args:
            folder: Name of the subfolder.
        """

        def move_entry(entry: TensorEntry) -> TensorEntry:
            chunks = entry.chunks
            if isinstance(chunks, ChunkGrid):
                chunks = ChunkGrid(chunks.key, chunks.sizes, f"{folder}/{chunks.file}", chunks.parts)
            else:
                chunks = tuple(replace(each, file=f"{folder}/{each.file}") for each in chunks)
            return replace(entry, chunks=chunks)

        files = {f"{folder}/{name}": replace(each, name=f"{folder}/{name}") for name, each in self.files.items()}
        return replace(self, tensors={name: move_entry(each) for name, each in self.tensors.items()}, files=files)

    def num_bytes(self) -> int:
        """Return the total length in bytes of all files except the manifest."""
        return sum(written.num_bytes for written in self.files.values())


def read_manifest(folder: Path) -> Manifest:
    """Read and return the manifest of a checkpoint, without opening its other files.

    Args:
        folder: Folder of the checkpoint.

    Raises:
        CheckpointError: If the folder has no manifest, or a damaged one.
    """
    path = folder / MANIFEST
    if isinstance(path, ObjectPath):
        stored = path.client.get_cached(path.key)
        if stored is None:
            raise CheckpointError(explain_path(folder))
        data, *_ = stored
        return Manifest.decode(data, str(path))
    if not os.path.lexists(path):
        raise CheckpointError(explain_path(folder))
    try:
        data = read_regular_file(path, MAX_BYTES)
    except CheckpointError as error:
        raise CheckpointError(f"{folder} is not a committed checkpoint: {error}") from error
    return Manifest.decode(data, str(path))


def _read_content(content: Any) -> Manifest:
    """Return the manifest that a JSON object describes, after checking that its parts fit together.

    Args:
        content: JSON object. It is untrusted. One that lacks a key raises the error of that access.

    Raises:
        CheckpointError: If a part is wrong, or the parts do not fit together.
    """
    files = {check_file_name(name): read_file_entry(name, entry) for name, entry in content["files"].items()}
    grids = ChunkGridReader(files)
    tensors = {name: read_tensor_entry(name, entry, files, grids) for name, entry in content["tensors"].items()}
    check_shared_bytes(tensors, files)
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


def _compute_digest(content: Any) -> str:
    """Return the SHA-256 hash of a JSON value in hexadecimal. It does not depend on the order of keys."""
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    ).hexdigest()
