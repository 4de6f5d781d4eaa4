"""Which bytes of a checkpoint a rank uses, so that it can compare just these with what was written."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.checkpoint.format.chunks import TensorChunk, meeting, overlapping
from headway.checkpoint.format.manifest import Manifest
from headway.checkpoint.format.values import dtype_named
from headway.checkpoint.loading.chunked_tensor import own_boxes
from headway.checkpoint.loading.reading import find, header_of
from headway.weights.shards import SafetensorsHeader

Ranges = dict[str, list[tuple[int, int]]]
"""By file, (from, to)."""


class UsedRanges:
    """Collects ranges.

    Args:
        folder: the checkpoint.
        manifest: its own.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest
        self._headers: dict[str, SafetensorsHeader] = {}
        self.ranges: Ranges = {}

    def add_own(self, like: Mapping[str, Sequence[Any]]) -> None:
        """The boxes of saved tensors that this rank's own tensors, which are spread, take up.

        Raises:
            CheckpointError: a file does not hold what the manifest places there.
        """
        for name, each in like.items():
            for own in each:
                if tuple(own.shape) == tuple(self._manifest.tensors[name].shape):
                    for offsets, memory in own_boxes(own):
                        self._add_box(name, offsets, memory.shape)

    def add_rest(self, left_out: Iterable[str]) -> None:
        """Everything but those tensors: all others, and files that hold none.

        Raises:
            CheckpointError: a file does not hold what the manifest places there.
        """
        tensors = self._manifest.tensors
        spread = set(left_out)
        held = {chunk.file for name in spread for chunk in tensors[name].chunks}
        for name in tensors.keys() - spread:
            for chunk in tensors[name].chunks:
                if chunk.file in held:
                    self._add_box(name, chunk.offsets, chunk.shape)
        for file, written in self._manifest.files.items():
            if file not in held:
                self.ranges[file] = [(0, max(1, written.num_bytes))]

    def _add_box(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> None:
        for chunk in overlapping(self._manifest.tensors[name].chunks, offsets, shape):
            begins, sizes = meeting(chunk, offsets, shape)
            self._add(name, chunk, begins, sizes)

    def _add(self, name: str, chunk: TensorChunk, begins: Sequence[int], sizes: Sequence[int]) -> None:
        file, dtype = chunk.file, dtype_named(self._manifest.tensors[name].dtype)
        path = self._folder / file
        if file not in self._headers:
            header = self._headers[file] = header_of(path)
            values = min((start for _, start in header.tensors.values()), default=1)
            self.ranges.setdefault(file, []).append((0, values))
        start = find(self._headers[file], path, chunk.key, dtype, chunk.shape)
        first = last = 0
        for begin, size, origin, length in zip(begins, sizes, chunk.offsets, chunk.shape):
            first = first * length + begin - origin
            last = last * length + begin - origin + size - 1
        self.ranges[file].append((start + first * dtype.itemsize, start + (last + 1) * dtype.itemsize))
