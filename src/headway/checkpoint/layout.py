"""A checkpoint's files against its manifest: every byte verified, tensors read by their logical names."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from headway.checkpoint.manifest import Entry, Manifest, read_manifest
from headway.checkpoint.shards import check_file, read_shard
from headway.checkpoint.values import dtype_named

_NUM_READERS = 4
"""Files that are verified at the same time; hashing one keeps one core busy."""


def verify(folder: Path, manifest: Manifest | None = None) -> Manifest:
    """Read every byte of a checkpoint and compare it with what was written.

    Raises:
        CheckpointError: with the first file that is not as it was.
    """
    found = read_manifest(folder) if manifest is None else manifest
    with ThreadPoolExecutor(_NUM_READERS, "headway-verify") as readers:
        checks = [
            readers.submit(check_file, folder / name, written) for name, written in found.files.items()
        ]
        try:
            for check in checks:  # in order, so that it is always the first bad file which is named
                check.result()
        finally:
            readers.shutdown(cancel_futures=True)
    return found


def read_tensors(folder: Path, manifest: Manifest, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors whose names begin with `prefix`, in the manifest's order; those of one chunk as views of the file.

    Raises:
        CheckpointError: a file lacks what the manifest places there.
    """
    wanted: dict[str, list[tuple[str, torch.dtype, tuple[int, ...]]]] = {}
    names = [name for name in manifest.tensors if name.startswith(prefix)]
    for name in names:
        entry = manifest.tensors[name]
        for chunk in entry.chunks:
            wanted.setdefault(chunk.file, []).append((chunk.key, dtype_named(entry.dtype), chunk.shape))
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
