"""A checkpoint's files against its manifest: verified where this rank uses them, tensors read by their logical names.

Which bytes of a checkpoint a rank uses, so that it can compare just these with what was written.

Saved tensors that consist of several boxes: any box of one is assembled from the file parts that it needs, one at a time.

How this run spreads what a checkpoint holds: for each saved tensor, the tensor of this rank that it will be put into or beside.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from headway.checkpoint.folders import store_of
from headway.checkpoint.format.chunks import TensorChunk, meeting, overlapping
from headway.checkpoint.format.manifest import Manifest, TensorEntry, read_manifest
from headway.checkpoint.format.tensors import view_of
from headway.checkpoint.format.values import dtype_named, encode, logical
from headway.checkpoint.loading.reading import check_file, find, header_of, read_files, read_owned, verify_ranges
from headway.checkpoint.state import ROWS, StatefulObjects, parameter_keys, parameter_names, place_of
from headway.checkpoint.stores.objects import FetchedCheckpoint
from headway.weights.files import StoredTensor, map_safetensors
from headway.weights.pieces import held, is_dtensor, is_spread, own_boxes, places, slices
from headway.weights.shards import StoredPlaces, bits

_MOST_OPEN = 64
"""Files that are mapped at once: each takes a descriptor, and a checkpoint has as many files as there were ranks."""


class CheckpointFiles:
    """A checkpoint's files, mapped where they are asked for.

    Args:
        folder: the checkpoint.
        manifest: its own.
        fetched: holds the folder, where it is of fetched ones.
    """

    def __init__(self, folder: Path, manifest: Manifest, fetched: FetchedCheckpoint | None = None) -> None:
        self._folder = folder
        self._manifest = manifest
        self._fetched = fetched
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


Ranges = dict[str, list[tuple[int, int]]]
"""By file, (from, to)."""


class UsedRanges:
    """Collects ranges.

    Args:
        folder: the checkpoint.
        manifest: its own.
        fetched: brings what is looked at into the folder.
    """

    def __init__(self, folder: Path, manifest: Manifest, fetched: FetchedCheckpoint | None = None) -> None:
        self._folder = folder
        self._manifest = manifest
        self._fetched = fetched
        self._headers: dict[str, StoredPlaces] = {}
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
        entry = self._manifest.tensors[name]
        for chunk in overlapping(entry.chunks, offsets, shape):
            file, dtype = chunk.file, dtype_named(entry.dtype)
            path = self._folder / file
            if file not in self._headers:
                header = self._headers[file] = header_of(path if self._fetched is None else self._fetched.header(file))
                values = min((start for _, start in header.values()), default=1)
                self.ranges.setdefault(file, []).append((0, values))
            start = find(self._headers[file], path, chunk.key, dtype, chunk.shape)
            first = last = 0
            for begin, size, origin, length in zip(*meeting(chunk, offsets, shape), chunk.offsets, chunk.shape):
                first = first * length + begin - origin
                last = last * length + begin - origin + size - 1
            self.ranges[file].append((start + first * dtype.itemsize, start + (last + 1) * dtype.itemsize))


class TargetLayout:
    """The layout of this run.

    Args:
        parts: the objects that a checkpoint is loaded into.
        rank: this one.
        world_size: ranks of the run.
    """

    def __init__(self, parts: StatefulObjects, rank: int = 0, world_size: int = 1) -> None:
        self._rank, self._world_size = rank, world_size
        self._weights: dict[str, Any] = {
            logical(f"model/{index}/{name}"): value
            for index, model in parts.chosen()
            for name, value in parts.export(model)
            if is_spread(value)
        }
        names = parameter_names(parts.models)
        self._parameters: dict[str, Any] = {
            f"optimizer/{index}/{key}": part
            for index, optimizer in enumerate(parts.optimizers)
            for group, keys in zip(optimizer.param_groups, parameter_keys(optimizer, names))
            for parameter, key in zip(group["params"], keys)
            if is_spread(part := parts.part_of(parameter))
        }
        # What is spread in the states of the other objects, by the names under which a save would keep it.
        tensors: dict[str, Any] = {}
        for kind, objects in parts.others.items() if self._weights or self._parameters else ():
            for index, obj in enumerate(objects):
                with suppress(Exception):  # what cannot be saved as it is now may be loaded all the same
                    encode(obj.state_dict(), f"{kind}/{index}", tensors)
        self._state = {name: each for name, each in tensors.items() if is_spread(each)}

    def like(self, aliases: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[Any]]:
        """For each saved tensor that is spread here, the own tensors that are spread as it will be.

        What an optimizer keeps of a parameter, and has its shape, is spread as the parameter is; what a registered object keeps, as
        it is spread now. Anything else comes whole.

        Args:
            aliases: tied names, and the name that holds their values.
            shapes: of the saved tensors.
        """
        if not self._weights and not self._parameters:
            # What each rank had of its own, where there are as many of them.
            rows = {name: shape for name, shape in shapes.items() if name.startswith(ROWS)}
            return {n: [place_of(shape, self._rank)] for n, shape in rows.items() if shape[:1] == (self._world_size,)}
        found: dict[str, list[Any]] = {}
        for name in (*shapes, *aliases):
            if name in self._weights:
                found.setdefault(aliases.get(name, name), []).append(self._weights[name])
        for name, shape in shapes.items():
            own = self._state.get(name, self._parameter(name))
            if own is not None and tuple(own.shape) == shape:
                found[name] = [own]
        return found

    def _parameter(self, name: str) -> Any:
        if not name.startswith("optimizer/"):
            return None
        prefix = name
        while prefix := prefix.rpartition("/")[0]:
            if prefix in self._parameters:
                return self._parameters[prefix]
        return None


MODEL = "model/"
"""How the names of weights begin."""


def verify(folder: Path, manifest: Manifest | None = None) -> Manifest:
    """Read every byte of a checkpoint and compare it with what was written.

    Raises:
        CheckpointError: with the first file that is not as it was.
    """
    found = read_manifest(folder) if manifest is None else manifest
    fetched = store_of(folder).fetched(found)
    if fetched is None:
        read_files(folder, list(found.files.values()))
    else:
        fetched.verify()
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
    fetched = store_of(folder).fetched(manifest)
    if fetched is not None:
        folder, is_verified = fetched.folder, False
    if like or fetched is not None:
        used = UsedRanges(folder, manifest, fetched)
        used.add_own(like)
        if fetched is not None:
            used.add_rest([*like, *(name for name in shapes if name.startswith(ROWS) and name not in like)])
            fetched.fetch(used.ranges)
        else:
            if is_verified:
                used.add_rest(like)
            verify_ranges(folder, manifest, used.ranges)
    owned = [
        name
        for name, entry in manifest.tensors.items()
        if len(entry.chunks) == 1 and not name.startswith((MODEL, ROWS)) and name not in like
    ]
    read: dict[str, Any] = dict(read_owned(folder, manifest, owned, is_verified and not like, bool(like)))
    files = CheckpointFiles(folder, manifest, fetched)
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
    fetched = store_of(folder).fetched(manifest)
    if fetched is not None:
        wanted = {name: entry for name, entry in manifest.tensors.items() if name.startswith(prefix)}
        needed = {chunk.file for entry in wanted.values() for chunk in entry.chunks}
        fetched.fetch({file: [(0, manifest.files[file].num_bytes)] for file in needed})
        folder = fetched.folder
    files = CheckpointFiles(folder, manifest, fetched)
    for name, entry in manifest.tensors.items():
        if name.startswith(prefix):
            is_one = len(entry.chunks) == 1
            yield name, files.view(entry.chunks[0], dtype_named(entry.dtype)) if is_one else ChunkedTensor(entry, files)
