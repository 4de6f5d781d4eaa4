"""Tensors of a checkpoint that are still in files: assemble boxes from chunks.

A box is a rectangular block of a tensor. A chunk is a box that is stored in one file. A saved tensor can consist of
several chunks. To read a box, the file ranges that contain its values are copied one at a time.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from headway.core.checkpoint.format.chunks import TensorChunk, intersect_box, iterate_overlapping
from headway.core.checkpoint.format.entries import TensorEntry
from headway.core.checkpoint.format.manifest import Manifest
from headway.core.checkpoint.format.tensors import get_view
from headway.core.checkpoint.stores.disk import check_file
from headway.core.checkpoint.stores.protocol import CheckpointDownload
from headway.core.weights.dtensor_boxes import iterate_boxes, list_own_boxes
from headway.core.weights.files import StoredTensor, map_safetensors
from headway.core.weights.pieces import get_local_part, is_dtensor, is_sharded, make_slices, replace_local
from headway.core.weights.tensor_bytes import find_dtype, view_as_bits

_MOST_OPEN = 64
"""Maximum number of files that are mapped at once.

Each mapped file uses a file descriptor, and a checkpoint has as many files as the saved run had ranks.
"""


class CheckpointFiles:
    """Files of a checkpoint. Each is mapped into memory on first use. At most `_MOST_OPEN` files are kept open.

    Args:
        folder: Folder of the checkpoint, or the local folder of downloaded files.
        manifest: Manifest of the checkpoint.
        download: Downloaded parts of the checkpoint, kept alive while the files are in use. Default: None, for a
            checkpoint on a disk.
    """

    def __init__(self, folder: Path, manifest: Manifest, download: CheckpointDownload | None = None) -> None:
        self._folder = folder
        self._manifest = manifest
        self._download = download  # holds a reference: the local folder is removed with this object
        self._open_files: dict[str, Mapping[str, StoredTensor]] = {}
        self._paths: dict[str, Path] = {}

    def open_file(self, file: str) -> Mapping[str, StoredTensor]:
        """Map a file, and return its tensors by key. Their values are not read yet.

        Raises:
            CheckpointError: If the file's length differs from the one in the manifest, or the file violates the format.
        """
        tensors = self._open_files.pop(file, None)
        if tensors is None:
            check_file(self._folder / file, self._manifest.files[file])
            tensors, _ = map_safetensors(self._folder / file)
            if len(self._open_files) >= _MOST_OPEN:
                del self._open_files[next(iter(self._open_files))]
        self._open_files[file] = tensors  # moved to the end: evicted last
        return tensors

    def view_chunk(self, chunk: TensorChunk, dtype: torch.dtype) -> torch.Tensor:
        """Return a chunk's values as a view of the mapped file.

        Args:
            chunk: Chunk of a tensor.
            dtype: Dtype of the tensor in the manifest.

        Raises:
            CheckpointError: If the file lacks the chunk's key, or holds a tensor of another dtype or shape under it.
        """
        if chunk.file not in self._paths:  # cached: joining a path for each of many tensors takes longer than reading
            self._paths[chunk.file] = self._folder / chunk.file
        return get_view(self.open_file(chunk.file), self._paths[chunk.file], chunk.key, dtype, chunk.shape)


class ChunkedTensor:
    """Saved tensor whose values are still in files.

    Args:
        entry: The manifest's entry of the tensor.
        files: Files that hold its chunks.

    Attributes:
        shape: Global shape of the tensor.
        dtype: Dtype of the saved values.
    """

    def __init__(self, entry: TensorEntry, files: CheckpointFiles) -> None:
        self.shape = torch.Size(entry.shape)
        self.dtype = find_dtype(entry.dtype)
        self._chunks = entry.chunks
        self._files = files

    def iterate_tiles(
        self, offsets: Sequence[int], shape: Sequence[int]
    ) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
        """Yield the saved values of a box (rectangular block of the tensor), one part for each chunk that overlaps it.

        Args:
            offsets: First index of the box along each dim of the tensor.
            shape: Shape of the box.

        Yields:
            Pairs of (slices within the box, values of this part). The values are a view of the mapped file, or a copy
                if the file format lacks the dtype.

        Raises:
            CheckpointError: If a file differs from the manifest.
        """
        for chunk in iterate_overlapping(self._chunks, offsets, shape):
            begins, sizes = intersect_box(chunk, offsets, shape)
            view = self._files.view_chunk(chunk, self.dtype)
            yield make_slices(begins, sizes, offsets), view[make_slices(begins, sizes, chunk.offsets)]

    def fill(self, box: torch.Tensor, offsets: Sequence[int]) -> None:
        """Copy the saved values of a box (rectangular block) into a tensor of the box's shape and the saved dtype.

        Args:
            box: Tensor to fill.
            offsets: First index of the box along each dim of the saved tensor.

        Raises:
            CheckpointError: If a file differs from the manifest.
        """
        for where, values in self.iterate_tiles(offsets, box.shape):
            view_as_bits(box[where]).copy_(view_as_bits(values))

    def assemble(self) -> torch.Tensor:
        """Return the full tensor in new host memory.

        Raises:
            CheckpointError: If a file differs from the manifest.
        """
        offsets = (0,) * len(self.shape)
        for _ in self.iterate_tiles(offsets, self.shape):  # checks the files before allocating what the manifest claims
            pass
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.fill(tensor, offsets)
        return tensor


def read_whole(saved: "torch.Tensor | ChunkedTensor") -> torch.Tensor:
    """Return a saved tensor, which is in memory or in files, as a full tensor in memory.

    Raises:
        CheckpointError: If a file differs from the manifest.
    """
    return saved if isinstance(saved, torch.Tensor) else saved.assemble()


def iterate_pairs(own: Any, saved: "torch.Tensor | ChunkedTensor") -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the parts of this rank's tensor together with their saved values.

    An unsharded tensor whose saved values are in memory is yielded as one pair.

    Args:
        own: Tensor or shard of this rank.
        saved: Saved tensor, in memory or in files.

    Yields:
        Pairs of (part of this rank's tensor, its saved values), with equal shapes.

    Raises:
        CheckpointError: If a file differs from the manifest.
    """
    if isinstance(saved, torch.Tensor) and not is_sharded(own):
        yield own, saved
        return
    for offsets, memory in list_own_boxes(own):
        if isinstance(saved, torch.Tensor):
            yield memory, saved[make_slices(offsets, memory.shape)]
        elif memory.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(memory):
            for where, values in saved.iterate_tiles(offsets, memory.shape):
                yield memory[where], values
        else:  # elements share memory, so values of all chunks must be compared together
            box = torch.empty(memory.shape, dtype=saved.dtype)
            saved.fill(box, offsets)
            yield memory, box


def read_sharded_like(own: Any, saved: ChunkedTensor) -> Any:
    """Return the saved values in new memory, sharded like this rank's own tensor.

    A DTensor is returned on the device of `own`, and a `ShardPiece` in host memory.

    Args:
        own: DTensor or `ShardPiece` of this rank.
        saved: Saved tensor of the same global shape.

    Raises:
        CheckpointError: If a file differs from the manifest.
    """
    if not is_dtensor(own):
        boxes = []
        for box in own.boxes:
            values = torch.empty(box.values.shape, dtype=saved.dtype)
            saved.fill(values, box.offsets)
            boxes.append(type(box)(box.offsets, values, box.is_written))
        return type(own)(own.shape, saved.dtype, tuple(boxes))
    like = get_local_part(own)
    local = torch.empty(like.shape, dtype=saved.dtype)
    for offsets, where in iterate_boxes(own):
        saved.fill(local[where], offsets)
    return replace_local(own, local.to(like.device), own.stride())
