"""A checkpoint's files against its manifest: every byte verified, tensors read by their logical names."""

from collections.abc import Container, Iterator, Mapping
from pathlib import Path

import torch

from headway.checkpoint.manifest import Entry, Manifest, read_manifest
from headway.checkpoint.reading import check_file, read_files, read_owned
from headway.checkpoint.shards import read_shard
from headway.checkpoint.values import dtype_named

MODEL = "model/"
"""How the names of weights begin."""


def verify(folder: Path, manifest: Manifest | None = None) -> Manifest:
    """Read every byte of a checkpoint and compare it with what was written.

    Raises:
        CheckpointError: with the first file that is not as it was.
    """
    found = read_manifest(folder) if manifest is None else manifest
    read_files(folder, list(found.files.values()))
    return found


def read_state(folder: Path, manifest: Manifest, is_verified: bool) -> tuple[dict[str, torch.Tensor], set[str]]:
    """All tensors of a checkpoint, and the names of those in memory of their own.

    Weights, which are copied into a model, are views of their files; the rest is read, and may become an object's.

    Args:
        folder: the checkpoint.
        manifest: its own.
        is_verified: compare every byte with what was written first.

    Raises:
        CheckpointError: a file is not as it was, or lacks what the manifest places there.
    """
    own = [name for name, entry in manifest.tensors.items() if len(entry.chunks) == 1 and not name.startswith(MODEL)]
    read = read_owned(folder, manifest, own, is_verified)
    read |= dict(read_tensors(folder, manifest, left_out=set(own)))
    return {name: read[name] for name in manifest.tensors}, set(own)


def read_tensors(
    folder: Path, manifest: Manifest, prefix: str = "", left_out: Container[str] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors whose names begin with `prefix`, in the manifest's order; those of one chunk as views of the file.

    Raises:
        CheckpointError: a file lacks what the manifest places there.
    """
    wanted: dict[str, list[tuple[str, torch.dtype, tuple[int, ...]]]] = {}
    names = [name for name in manifest.tensors if name.startswith(prefix) and name not in left_out]
    for name in names:
        entry = manifest.tensors[name]
        for chunk in entry.chunks:
            wanted.setdefault(chunk.file, []).append((chunk.key, dtype_named(entry.dtype), chunk.shape))
    for file in wanted:
        check_file(folder / file, manifest.files[file])
    read = {file: read_shard(folder / file, keys) for file, keys in wanted.items()}
    for name in names:
        yield name, _joined(manifest.tensors[name], read)


def _joined(entry: Entry, read: Mapping[str, Mapping[str, torch.Tensor]]) -> torch.Tensor:
    if len(entry.chunks) == 1:
        return read[entry.chunks[0].file][entry.chunks[0].key]
    out = torch.empty(entry.shape, dtype=dtype_named(entry.dtype))
    for chunk in entry.chunks:
        box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.shape))
        out[box] = read[chunk.file][chunk.key]
    return out
