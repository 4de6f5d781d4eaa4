"""A checkpoint's files against its manifest: every byte verified, tensors read by their logical names."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from headway.checkpoint.format.manifest import Manifest, read_manifest
from headway.checkpoint.format.values import dtype_named
from headway.checkpoint.loading.chunked_tensor import CheckpointFiles, ChunkedTensor, taken_like
from headway.checkpoint.loading.ranges import UsedRanges
from headway.checkpoint.loading.reading import read_files, read_owned, verify_ranges
from headway.checkpoint.loading.target_layout import TargetLayout
from headway.checkpoint.rows import ROWS

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


def read_state(
    folder: Path, manifest: Manifest, is_verified: bool, placing: TargetLayout | None = None
) -> tuple[dict[str, Any], set[str]]:
    """All tensors of a checkpoint but rows of other ranks, and the names of those in memory of their own.

    Weights, which are copied into a model, are views of their files, or, where they lie in several or are spread, left there until
    they are copied; the rest is read, and may become an object's.

    Args:
        folder: the checkpoint.
        manifest: its own.
        is_verified: compare every byte with what was written first, but for what is spread: each rank compares what it takes of that.
        placing: what is spread over the ranks here; None: nothing, and everything is put together.

    Raises:
        CheckpointError: a file is not as it was, or lacks what the manifest places there.
    """
    shapes = {name: tuple(entry.shape) for name, entry in manifest.tensors.items()}
    like = {} if placing is None else placing.like(manifest.aliases, shapes)
    if like:
        used = UsedRanges(folder, manifest)
        used.add_own(like)
        if is_verified:
            used.add_rest(like)
        verify_ranges(folder, manifest, used.ranges)
    owned = [
        name
        for name, entry in manifest.tensors.items()
        if len(entry.chunks) == 1 and not name.startswith((MODEL, ROWS)) and name not in like
    ]
    read: dict[str, Any] = dict(read_owned(folder, manifest, owned, is_verified and not like, bool(like)))
    files = CheckpointFiles(folder, manifest)
    for name, entry in manifest.tensors.items():
        if name not in read and (name in like or not name.startswith(ROWS)):
            mosaic, is_weight = ChunkedTensor(entry, files), name.startswith(MODEL)
            if name in like:
                is_alike = mosaic.shape == like[name][0].shape
                read[name] = mosaic if is_weight or not is_alike else taken_like(like[name][0], mosaic)
            elif len(entry.chunks) == 1:
                read[name] = files.view(entry.chunks[0], mosaic.dtype)
            else:
                read[name] = mosaic if is_weight and placing is not None else mosaic.whole()
    return {name: read[name] for name in manifest.tensors if name in read}, {
        name for name in read if not name.startswith(MODEL)
    }


def open_tensors(
    folder: Path, manifest: Manifest, prefix: str = ""
) -> Iterator[tuple[str, torch.Tensor | ChunkedTensor]]:
    """The tensors whose names begin with `prefix`, in the manifest's order: of one chunk as views of the file, others as mosaics.

    Raises:
        CheckpointError: a file lacks what the manifest places there.
    """
    files = CheckpointFiles(folder, manifest)
    for name, entry in manifest.tensors.items():
        if name.startswith(prefix):
            is_one = len(entry.chunks) == 1
            yield name, files.view(entry.chunks[0], dtype_named(entry.dtype)) if is_one else ChunkedTensor(entry, files)
