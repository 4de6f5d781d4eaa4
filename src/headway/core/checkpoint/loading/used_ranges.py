"""Collect the byte ranges of a checkpoint's files that this rank reads. Only these are downloaded and verified."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.core.checkpoint.format.chunks import intersect_box, iterate_overlapping
from headway.core.checkpoint.format.manifest import Manifest
from headway.core.checkpoint.loading.reading import (
    find_tensor_offset,
    read_file_header,
)
from headway.core.checkpoint.stores.protocol import CheckpointDownload
from headway.core.weights.dtensor_boxes import list_own_boxes
from headway.core.weights.safetensors_format import TensorOffsets
from headway.core.weights.tensor_bytes import find_dtype

Ranges = dict[str, list[tuple[int, int]]]
"""Byte ranges by file, as pairs of (begin, end)."""


class UsedRanges:
    """Collector of the byte ranges that this rank reads from a checkpoint. Only these are downloaded and verified.

    Args:
        folder: Folder of the checkpoint.
        manifest: Manifest of the checkpoint.
        download: Object that downloads file headers when they are needed. Default: None, for a checkpoint on a disk.

    Attributes:
        ranges: Byte ranges collected so far, as pairs of (begin, end) by file name.
    """

    def __init__(self, folder: Path, manifest: Manifest, download: CheckpointDownload | None = None) -> None:
        self._folder = folder
        self._manifest = manifest
        self._download = download
        self._headers: dict[str, TensorOffsets] = {}
        self.ranges: Ranges = {}

    def add_shards(self, targets: Mapping[str, Sequence[Any]]) -> None:
        """Add the byte ranges of the values that this rank's shards need.

        A tensor whose global shape differs from the saved one is skipped, because it cannot be loaded.

        Args:
            targets: For the name of each saved tensor, a list of this rank's tensors that receive its values.

        Raises:
            CheckpointError: If a file does not hold what the manifest lists.
        """
        for name, shards in targets.items():
            for own in shards:
                if tuple(own.shape) == tuple(self._manifest.tensors[name].shape):
                    for offsets, memory in list_own_boxes(own):
                        self._add_box(name, offsets, memory.shape)

    def add_tensors(self, names: Iterable[str]) -> None:
        """Add the byte ranges of all values of the given tensors.

        Args:
            names: Names of the tensors in the manifest.

        Raises:
            CheckpointError: If a file does not hold what the manifest lists.
        """
        for name in names:
            shape = self._manifest.tensors[name].shape
            self._add_box(name, (0,) * len(shape), shape)

    def add_all_except(self, excluded_names: Iterable[str]) -> None:
        """Add the byte ranges of all tensors except the given ones.

        A file that contains none of the given tensors is added entirely.

        Args:
            excluded_names: Names of the tensors to leave out, because `add_shards` has added their ranges or this rank
                does not need them.

        Raises:
            CheckpointError: If a file does not hold what the manifest lists.
        """
        tensors = self._manifest.tensors
        excluded = set(excluded_names)
        files_with_excluded = {chunk.file for name in excluded for chunk in tensors[name].chunks}
        for name in tensors.keys() - excluded:
            for chunk in tensors[name].chunks:
                if chunk.file in files_with_excluded:
                    self._add_box(name, chunk.offsets, chunk.shape)
        for file, written in self._manifest.files.items():
            if file not in files_with_excluded:
                self.ranges[file] = [(0, max(1, written.num_bytes))]

    def _add_box(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> None:
        """Add the byte ranges of a box (rectangular block) of a saved tensor, and of the headers of its files.

        Each range reaches from the first to the last byte that is needed of a chunk.

        Args:
            name: Name of the saved tensor.
            offsets: First index of the box along each dim of the tensor.
            shape: Shape of the box.

        Raises:
            CheckpointError: If a file does not hold what the manifest lists.
        """
        entry = self._manifest.tensors[name]
        for chunk in iterate_overlapping(entry.chunks, offsets, shape):
            file, dtype = chunk.file, find_dtype(entry.dtype)
            path = self._folder / file
            if file not in self._headers:
                header_path = path if self._download is None else self._download.download_header(file)
                header = self._headers[file] = read_file_header(header_path)
                header_end = min((start for _, start in header.values()), default=1)  # the first tensor's values follow
                self.ranges.setdefault(file, []).append((0, header_end))
            start = find_tensor_offset(self._headers[file], path, chunk.key, dtype, chunk.shape)
            begins, sizes = intersect_box(chunk, offsets, shape)
            first = last = 0  # row-major indices of the box's first and last element in the chunk
            for begin, size, chunk_begin, chunk_length in zip(begins, sizes, chunk.offsets, chunk.shape):
                first = first * chunk_length + (begin - chunk_begin)
                last = last * chunk_length + (begin - chunk_begin + size - 1)
            self.ranges[file].append((start + first * dtype.itemsize, start + (last + 1) * dtype.itemsize))
