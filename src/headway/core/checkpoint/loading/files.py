"""Read and verify the tensors of a checkpoint by logical name.

If a tensor is sharded in this run, each rank verifies and reads only the bytes that it uses.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from headway.core.checkpoint.folders import find_store
from headway.core.checkpoint.format.manifest import Manifest, read_manifest
from headway.core.checkpoint.loading.chunked import CheckpointFiles, ChunkedTensor, read_sharded_like
from headway.core.checkpoint.loading.reading import (
    read_files,
    read_owned,
    verify_ranges,
)
from headway.core.checkpoint.loading.target_layout import TargetLayout
from headway.core.checkpoint.loading.used_ranges import UsedRanges
from headway.core.checkpoint.state import ROWS
from headway.core.checkpoint.stores.protocol import CheckpointDownload
from headway.core.weights.tensor_bytes import find_dtype

MODEL = "model/"
"""Prefix of the names of all tensors that belong to a model."""


def verify_checkpoint(folder: Path, manifest: Manifest | None = None) -> Manifest:
    """Read every byte of a checkpoint, compare it with the hashes, and return the manifest.

    Args:
        folder: Folder of the checkpoint.
        manifest: Manifest of the checkpoint. Default: None, it is read from the folder.

    Raises:
        CheckpointError: If there is no readable manifest, or a file differs from it. The message contains the first
            such file.
    """
    if manifest is None:
        manifest = read_manifest(folder)
    download = find_store(folder).prepare_download(manifest)
    if download is None:
        read_files(folder, list(manifest.files.values()))
    else:
        download.verify()
    return manifest


def read_state(
    folder: Path, manifest: Manifest, is_verified: bool, layout: TargetLayout | None = None
) -> tuple[dict[str, Any], set[str]]:
    """Return the tensors of a checkpoint that this rank needs.

    Weights are views of their files, because they are copied into a model later. Weights that are sharded or consist
    of several chunks stay in their files until they are copied. All other tensors are read into memory, and objects
    may keep them. If a tensor has one row per rank, rows of other ranks are left out.

    Args:
        folder: Folder of the checkpoint.
        manifest: Manifest of the checkpoint.
        is_verified: Whether to compare every byte with the hashes. For sharded tensors, each rank always compares its
            own shards, and no others. Ignored in object stores, where all bytes that are read are compared.
        layout: Layout of this run. Default: None, nothing is sharded, and all tensors are read in full.

    Returns:
        Pair of (tensors by logical name, names of tensors in new memory, which objects may keep).

    Raises:
        CheckpointError: If a file differs from the manifest, or lacks what the manifest lists.
    """
    shapes = {name: tuple(entry.shape) for name, entry in manifest.tensors.items()}
    targets = {} if layout is None else layout.map_sharded(manifest.aliases, shapes)
    rows_of_others = {name for name in shapes if name.startswith(ROWS) and name not in targets}
    download = find_store(folder).prepare_download(manifest)
    if download is not None:
        _download_used_ranges(download, manifest, targets, rows_of_others)
        folder, is_verified = download.folder, False  # the download has compared all bytes with the hashes
    elif targets:
        _verify_used_ranges(folder, manifest, targets, is_verified)
        is_verified = False  # done: what this rank uses was compared
    # Read all small tensors at once, on several threads. With `targets`, other files have been checked above if at all.
    names_to_read = [
        name
        for name, entry in manifest.tensors.items()
        if len(entry.chunks) == 1 and not name.startswith((MODEL, ROWS)) and name not in targets
    ]
    new_tensors = read_owned(folder, manifest, names_to_read, is_verified, skips_other_files=bool(targets))
    files = CheckpointFiles(folder, manifest, download)
    keeps_chunks_in_files = layout is not None
    tensors: dict[str, Any] = {}
    for name in manifest.tensors:
        if name in new_tensors:
            tensors[name] = new_tensors[name]
        elif name in targets:
            tensors[name] = _read_sharded_tensor(name, manifest, files, targets[name][0])
        elif name not in rows_of_others:
            tensors[name] = _read_full_tensor(name, manifest, files, keeps_chunks_in_files)
    return tensors, {name for name in tensors if not name.startswith(MODEL)}


def _download_used_ranges(
    download: CheckpointDownload,
    manifest: Manifest,
    targets: Mapping[str, Sequence[Any]],
    unused_names: Collection[str],
) -> None:
    """Download the bytes of a checkpoint that this rank reads, and compare them with the hashes.

    Args:
        download: Download of the checkpoint from an object store.
        manifest: Manifest of the checkpoint.
        targets: This rank's sharded tensors, by the name of the saved tensor whose values they receive. Only the bytes
            of these shards are downloaded.
        unused_names: Names of saved tensors that this rank does not read. All others are downloaded in full.

    Raises:
        CheckpointError: If a file differs from the manifest, or lacks what the manifest lists.
    """
    used = UsedRanges(download.folder, manifest, download)
    used.add_shards(targets)
    used.add_all_except([*targets, *unused_names])
    download.download_ranges(used.ranges)


def _verify_used_ranges(
    folder: Path, manifest: Manifest, targets: Mapping[str, Sequence[Any]], includes_unsharded: bool
) -> None:
    """Compare the bytes that this rank reads from a folder with the hashes.

    Args:
        folder: Folder of the checkpoint.
        manifest: Manifest of the checkpoint.
        targets: This rank's sharded tensors, by the name of the saved tensor whose values they receive.
        includes_unsharded: Whether to compare also all bytes of the other tensors. One rank per machine does so.

    Raises:
        CheckpointError: If a file differs from the manifest, or lacks what the manifest lists.
    """
    used = UsedRanges(folder, manifest)
    used.add_shards(targets)
    if includes_unsharded:
        used.add_all_except(targets)
    verify_ranges(folder, manifest, used.ranges)


def _read_sharded_tensor(name: str, manifest: Manifest, files: CheckpointFiles, target: Any) -> Any:
    """Return a saved tensor that this rank loads into a shard.

    A weight stays in its files until it is copied into the model, and so does a tensor whose shape differs from the
    target's. The load refuses such a tensor before it would be copied. Any other tensor is read, in the target's
    sharding.

    Args:
        name: Name of the saved tensor.
        manifest: Manifest of the checkpoint.
        files: Files of the checkpoint.
        target: DTensor or `ShardPiece` of this rank.

    Returns:
        A `ChunkedTensor`, or a tensor like `target`.

    Raises:
        CheckpointError: If a file differs from the manifest.
    """
    stored = ChunkedTensor(manifest.tensors[name], files)
    if name.startswith(MODEL) or stored.shape != target.shape:
        return stored
    return read_sharded_like(target, stored)


def _read_full_tensor(name: str, manifest: Manifest, files: CheckpointFiles, keeps_chunks_in_files: bool) -> Any:
    """Return a saved tensor that this rank loads in full.

    Args:
        name: Name of the saved tensor.
        manifest: Manifest of the checkpoint.
        files: Files of the checkpoint.
        keeps_chunks_in_files: Whether a weight of several chunks stays in its files until it is copied.

    Returns:
        A view of the file, if the tensor has a single chunk. If not, a `ChunkedTensor` or a tensor in new memory.

    Raises:
        CheckpointError: If a file differs from the manifest.
    """
    entry = manifest.tensors[name]
    stored = ChunkedTensor(entry, files)
    if len(entry.chunks) == 1:
        return files.view_chunk(entry.chunks[0], stored.dtype)
    if name.startswith(MODEL) and keeps_chunks_in_files:
        return stored
    return stored.assemble()


def open_tensors(
    folder: Path, manifest: Manifest, prefix: str = ""
) -> Iterator[tuple[str, torch.Tensor | ChunkedTensor]]:
    """Yield (name, tensor) for the tensors whose names begin with `prefix`, in the manifest's order.

    A tensor with one chunk is a view of the mapped file. Other tensors are `ChunkedTensor` objects.

    Args:
        folder: Folder of the checkpoint.
        manifest: Manifest of the checkpoint.
        prefix: Prefix of the names. Default: "", all tensors.

    Raises:
        CheckpointError: If a file lacks what the manifest lists.
    """
    entries = {name: entry for name, entry in manifest.tensors.items() if name.startswith(prefix)}
    download = find_store(folder).prepare_download(manifest)
    if download is not None:
        needed_files = {chunk.file for entry in entries.values() for chunk in entry.chunks}
        download.download_ranges({file: [(0, manifest.files[file].num_bytes)] for file in needed_files})
        folder = download.folder
    files = CheckpointFiles(folder, manifest, download)
    for name, entry in entries.items():
        if len(entry.chunks) == 1:
            yield name, files.view_chunk(entry.chunks[0], find_dtype(entry.dtype))
        else:
            yield name, ChunkedTensor(entry, files)
