"""Saved tensors that consist of several boxes: any box of one is assembled from the file parts that it needs, one at a time."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from headway.checkpoint.format.chunks import TensorChunk, meeting, overlapping
from headway.checkpoint.format.manifest import Manifest, TensorEntry
from headway.checkpoint.format.shards import view_of
from headway.checkpoint.format.values import dtype_named
from headway.checkpoint.loading.reading import check_file
from headway.weights.files import StoredTensor, map_safetensors
from headway.weights.pieces import held, is_dtensor, is_spread, places, slices
from headway.weights.shards import bits

_MOST_OPEN = 64
"""Files that are mapped at once: each takes a descriptor, and a checkpoint has as many files as there were ranks."""


class CheckpointFiles:
    """A checkpoint's files, mapped where they are asked for.

    Args:
        folder: the checkpoint.
        manifest: its own.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest
        self._open: dict[str, Mapping[str, StoredTensor]] = {}

    def stored(self, file: str) -> Mapping[str, StoredTensor]:
        """What a file holds.

        Raises:
            CheckpointError: it is not what was written.
        """
        found = self._open.pop(file, None)
        if found is None:
            check_file(self._folder / file, self._manifest.files[file])
            found, _ = map_safetensors(self._folder / file)
            if len(self._open) >= _MOST_OPEN:
                del self._open[next(iter(self._open))]
        self._open[file] = found  # the last one to go
        return found

    def view(self, chunk: TensorChunk, dtype: torch.dtype) -> torch.Tensor:
        """A chunk's values, where they lie in its file.

        Raises:
            CheckpointError: the file holds something else.
        """
        return view_of(self.stored(chunk.file), self._folder / chunk.file, chunk.key, dtype, chunk.shape)


class ChunkedTensor:
    """A saved tensor that is not in memory.

    Args:
        entry: what the manifest says of it.
        files: where its boxes lie.
    """

    def __init__(self, entry: TensorEntry, files: CheckpointFiles) -> None:
        self.shape = torch.Size(entry.shape)
        self.dtype = dtype_named(entry.dtype)
        self._chunks = entry.chunks
        self._files = files

    def tiles(self, offsets: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
        """(where it lies in the box, values as a view of a file) of each part that a box is made of.

        Raises:
            CheckpointError: a file is not what was written.
        """
        for chunk in overlapping(self._chunks, offsets, shape):
            begins, sizes = meeting(chunk, offsets, shape)
            view = self._files.view(chunk, self.dtype)
            yield slices(begins, sizes, offsets), view[slices(begins, sizes, chunk.offsets)]

    def fill(self, box: torch.Tensor, offsets: Sequence[int]) -> None:
        """Put the values of a box that begins there into memory of that shape and dtype."""
        for where, values in self.tiles(offsets, box.shape):
            bits(box[where]).copy_(bits(values))

    def whole(self) -> torch.Tensor:
        """All of it, in memory of its own."""
        offsets = (0,) * len(self.shape)
        for _ in self.tiles(offsets, self.shape):  # before memory is taken for what the manifest only claims
            pass
        made = torch.empty(self.shape, dtype=self.dtype)
        self.fill(made, offsets)
        return made


def own_boxes(value: Any) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """(where it begins, its memory) of each box of a tensor that lies on this rank: of a plain one all of it."""
    if is_dtensor(value):
        local = held(value)
        return [(offsets, local[where]) for offsets, where in places(value)]
    if is_spread(value):
        return [(box.offsets, box.values) for box in value.boxes]
    return [((0,) * value.ndim, value)]


def pairs(own: Any, saved: "torch.Tensor | ChunkedTensor") -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(a part of this rank's tensor, the values saved for it), which have one shape; files are mapped one after the other."""
    if is_spread(own) or isinstance(saved, ChunkedTensor):
        for offsets, memory in own_boxes(own):
            if isinstance(saved, torch.Tensor):
                yield memory, saved[slices(offsets, memory.shape)]
            elif memory.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(memory):
                yield from ((memory[where], values) for where, values in saved.tiles(offsets, memory.shape))
            else:  # elements that share memory must be seen together
                box = torch.empty(memory.shape, dtype=saved.dtype)
                saved.fill(box, offsets)
                yield memory, box
    else:
        yield own, saved


def taken_like(own: Any, saved: ChunkedTensor) -> Any:
    """The saved values in new memory, spread over the ranks as this rank's own tensor is."""
    if not is_dtensor(own):
        boxes = []
        for box in own.boxes:
            values = torch.empty(box.values.shape, dtype=saved.dtype)
            saved.fill(values, box.offsets)
            boxes.append(type(box)(box.offsets, values, box.is_written))
        return type(own)(own.shape, saved.dtype, tuple(boxes))
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    like = held(own)
    local = torch.empty(like.shape, dtype=saved.dtype)
    for offsets, where in places(own):
        saved.fill(local[where], offsets)
    meta = TensorMeta(own.shape, own.stride(), saved.dtype)
    spec = DTensorSpec(own.device_mesh, own.placements, tensor_meta=meta)
    # Not from_local, which would move what is offloaded to the mesh's device.
    return DTensor(local.to(like.device), spec, requires_grad=False)  # type: ignore[no-untyped-call]
