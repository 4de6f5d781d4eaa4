"""Read a checkpoint's tensors by logical name, assemble boxes from chunks, and verify the bytes that are used.

A box is a rectangular block of a tensor. A chunk is a box that is stored in one file. A saved tensor can consist of
several chunks. To read a box, the file ranges that contain its values are copied one at a time.

`TargetLayout` determines which tensor of this rank receives the values of each saved tensor. If the tensor is sharded,
each rank verifies only the bytes that it uses.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from headway.core.checkpoint.folders import find_store
from headway.core.checkpoint.format.chunks import TensorChunk, intersect_box, iterate_overlapping
from headway.core.checkpoint.format.manifest import Manifest, TensorEntry, read_manifest
from headway.core.checkpoint.format.tensors import get_view
from headway.core.checkpoint.format.text import to_logical_name
from headway.core.checkpoint.format.values import encode_value
from headway.core.checkpoint.loading.reading import (
    find_tensor_offset,
    read_file_header,
    read_files,
    read_owned,
    verify_ranges,
)
from headway.core.checkpoint.state import ROWS, StatefulObjects, describe_row, list_parameter_keys, map_parameter_names
from headway.core.checkpoint.stores.disk import check_file
from headway.core.checkpoint.stores.protocol import FetchedFiles
from headway.core.weights.files import StoredTensor, map_safetensors
from headway.core.weights.pieces import (
    get_local_part,
    is_dtensor,
    is_spread,
    iterate_boxes,
    list_own_boxes,
    make_slices,
    replace_local,
)
from headway.core.weights.shards import StoredPlaces, find_dtype, view_as_bits

_MOST_OPEN = 64
"""Maximum number of files that are mapped at once.

Each mapped file uses a file descriptor, and a checkpoint has as many files as the saved run had ranks.
"""


class CheckpointFiles:
    """Files of a checkpoint. Each is mapped into memory on first use. At most `_MOST_OPEN` files are kept open.

    Args:
        folder: Folder of the checkpoint, or the local folder of downloaded files.
        manifest: Manifest of the checkpoint.
        fetched: Downloaded parts of the checkpoint, kept alive while the files are in use. Default: None, for a
            checkpoint on a disk.
    """

    def __init__(self, folder: Path, manifest: Manifest, fetched: FetchedFiles | None = None) -> None:
        self._folder = folder
        self._manifest = manifest
        self._fetched = fetched
        self._open: dict[str, Mapping[str, StoredTensor]] = {}
        self._paths: dict[str, Path] = {}

    def open_file(self, file: str) -> Mapping[str, StoredTensor]:
        """Map a file, and return its tensors by key. Their values are not read yet.

        Raises:
            CheckpointError: If the file's length differs from the one in the manifest, or the file violates the format.
        """
        found = self._open.pop(file, None)
        if found is None:
            check_file(self._folder / file, self._manifest.files[file])
            found, _ = map_safetensors(self._folder / file)
            if len(self._open) >= _MOST_OPEN:
                del self._open[next(iter(self._open))]
        self._open[file] = found  # moved to the end: evicted last
        return found

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
        made = torch.empty(self.shape, dtype=self.dtype)
        self.fill(made, offsets)
        return made


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
    if is_spread(own) or isinstance(saved, ChunkedTensor):
        for offsets, memory in list_own_boxes(own):
            if isinstance(saved, torch.Tensor):
                yield memory, saved[make_slices(offsets, memory.shape)]
            elif memory.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(memory):
                yield from ((memory[where], values) for where, values in saved.iterate_tiles(offsets, memory.shape))
            else:  # elements share memory, so values of all chunks must be compared together
                box = torch.empty(memory.shape, dtype=saved.dtype)
                saved.fill(box, offsets)
                yield memory, box
    else:
        yield own, saved


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


Ranges = dict[str, list[tuple[int, int]]]
"""Byte ranges by file, as pairs of (begin, end)."""


class UsedRanges:
    """Collector of the byte ranges that this rank reads from a checkpoint. Only these are downloaded and verified.

    Args:
        folder: Folder of the checkpoint.
        manifest: Manifest of the checkpoint.
        fetched: Object that downloads file headers when they are needed. Default: None, for a checkpoint on a disk.

    Attributes:
        ranges: Byte ranges collected so far, as pairs of (begin, end) by file name.
    """

    def __init__(self, folder: Path, manifest: Manifest, fetched: FetchedFiles | None = None) -> None:
        self._folder = folder
        self._manifest = manifest
        self._fetched = fetched
        self._headers: dict[str, StoredPlaces] = {}
        self.ranges: Ranges = {}

    def add_own(self, like: Mapping[str, Sequence[Any]]) -> None:
        """Add the byte ranges of the values that this rank's shards need.

        A tensor whose global shape differs from the saved one is skipped, because it cannot be loaded.

        Args:
            like: For the name of each saved tensor, a list of this rank's tensors that receive its values.

        Raises:
            CheckpointError: If a file does not hold what the manifest lists.
        """
        for name, each in like.items():
            for own in each:
                if tuple(own.shape) == tuple(self._manifest.tensors[name].shape):
                    for offsets, memory in list_own_boxes(own):
                        self._add_box(name, offsets, memory.shape)

    def add_rest(self, left_out: Iterable[str]) -> None:
        """Add the byte ranges of all tensors except the given ones.

        A file that contains none of the given tensors is added entirely.

        Args:
            left_out: Names of the tensors to leave out, because `add_own` has added their ranges or this rank does not
                need them.

        Raises:
            CheckpointError: If a file does not hold what the manifest lists.
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
        for chunk in iterate_overlapping(entry.chunks, offsets, shape):
            file, dtype = chunk.file, find_dtype(entry.dtype)
            path = self._folder / file
            if file not in self._headers:
                header = self._headers[file] = read_file_header(
                    path if self._fetched is None else self._fetched.download_header(file)
                )
                values = min((start for _, start in header.values()), default=1)
                self.ranges.setdefault(file, []).append((0, values))
            start = find_tensor_offset(self._headers[file], path, chunk.key, dtype, chunk.shape)
            first = last = 0
            for begin, size, origin, length in zip(*intersect_box(chunk, offsets, shape), chunk.offsets, chunk.shape):
                first = first * length + begin - origin
                last = last * length + begin - origin + size - 1
            self.ranges[file].append((start + first * dtype.itemsize, start + (last + 1) * dtype.itemsize))


class TargetLayout:
    """Layout into which a checkpoint is loaded: how this run shards each saved tensor.

    Args:
        parts: Objects that should load the checkpoint.
        rank: Rank of this process. Default: 0.
        world_size: Number of ranks of the run. Default: 1.
    """

    def __init__(self, parts: StatefulObjects, rank: int = 0, world_size: int = 1) -> None:
        self._rank = rank
        self._world_size = world_size
        self._weights: dict[str, Any] = {
            to_logical_name(f"model/{index}/{name}"): value
            for index, model in parts.list_chosen()
            for name, value in parts.export(model)
            if is_spread(value)
        }
        names = map_parameter_names(parts.models)
        self._parameters: dict[str, Any] = {
            f"optimizer/{index}/{key}": part
            for index, optimizer in enumerate(parts.optimizers)
            for group, keys in zip(optimizer.param_groups, list_parameter_keys(optimizer, names))
            for parameter, key in zip(group["params"], keys)
            if is_spread(part := parts.part_of(parameter))
        }
        # Sharded tensors in the states of the other objects, by the names under which a save would store them.
        tensors: dict[str, Any] = {}
        for kind, objects in parts.others.items() if self._weights or self._parameters else ():
            for index, obj in enumerate(objects):
                with suppress(Exception):  # a state that cannot be saved now may still be loaded
                    encode_value(obj.state_dict(), f"{kind}/{index}", tensors)
        self._state = {name: each for name, each in tensors.items() if is_spread(each)}

    def map_sharded(self, aliases: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[Any]]:
        """Return, for the name of each saved tensor, a list of this rank's sharded tensors that receive its values.

        Saved tensors that this run does not shard are left out, and are read in full. An optimizer state that has its
        parameter's shape is sharded like the parameter. A tensor of a registered object keeps its current sharding.

        If this run shards no weights, the result contains only saved tensors with one row per rank. For each of them,
        this rank receives its own row. They are left out if the world size has changed.

        Args:
            aliases: Names of tied tensors, each mapped to the name of the tensor that holds their values.
            shapes: Shapes of the saved tensors by name.
        """
        if not self._weights and not self._parameters:
            # Of tensors with one row per rank, each rank reads its own row, if the world size is unchanged.
            rows = {name: shape for name, shape in shapes.items() if name.startswith(ROWS)}
            return {
                n: [describe_row(shape, self._rank)] for n, shape in rows.items() if shape[:1] == (self._world_size,)
            }
        found: dict[str, list[Any]] = {}
        for name in (*shapes, *aliases):
            if name in self._weights:
                found.setdefault(aliases.get(name, name), []).append(self._weights[name])
        for name, shape in shapes.items():
            own = self._state.get(name, self._find_parameter(name))
            if own is not None and tuple(own.shape) == shape:
                found[name] = [own]
        return found

    def _find_parameter(self, name: str) -> Any:
        if not name.startswith("optimizer/"):
            return None
        prefix = name
        while prefix := prefix.rpartition("/")[0]:
            if prefix in self._parameters:
                return self._parameters[prefix]
        return None


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
    found = read_manifest(folder) if manifest is None else manifest
    fetched = find_store(folder).prepare_download(found)
    if fetched is None:
        read_files(folder, list(found.files.values()))
    else:
        fetched.verify()
    return found


def read_state(
    folder: Path, manifest: Manifest, is_verified: bool, placing: TargetLayout | None = None
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
        placing: Layout of this run. Default: None, nothing is sharded, and all tensors are read in full.

    Returns:
        Pair of (tensors by logical name, names of tensors in new memory, which objects may keep).

    Raises:
        CheckpointError: If a file differs from the manifest, or lacks what the manifest lists.
    """
    shapes = {name: tuple(entry.shape) for name, entry in manifest.tensors.items()}
    like = {} if placing is None else placing.map_sharded(manifest.aliases, shapes)
    fetched = find_store(folder).prepare_download(manifest)
    if fetched is not None:
        folder, is_verified = fetched.folder, False
    if like or fetched is not None:
        used = UsedRanges(folder, manifest, fetched)
        used.add_own(like)
        if fetched is not None:
            used.add_rest([*like, *(name for name in shapes if name.startswith(ROWS) and name not in like)])
            fetched.download_ranges(used.ranges)
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
                read[name] = mosaic if is_weight or not is_alike else read_sharded_like(like[name][0], mosaic)
            elif len(entry.chunks) == 1:
                read[name] = files.view_chunk(entry.chunks[0], mosaic.dtype)
            else:
                read[name] = mosaic if is_weight and placing is not None else mosaic.assemble()
    return {name: read[name] for name in manifest.tensors if name in read}, {
        name for name in read if not name.startswith(MODEL)
    }


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
    fetched = find_store(folder).prepare_download(manifest)
    if fetched is not None:
        wanted = {name: entry for name, entry in manifest.tensors.items() if name.startswith(prefix)}
        needed = {chunk.file for entry in wanted.values() for chunk in entry.chunks}
        fetched.download_ranges({file: [(0, manifest.files[file].num_bytes)] for file in needed})
        folder = fetched.folder
    files = CheckpointFiles(folder, manifest, fetched)
    for name, entry in manifest.tensors.items():
        if name.startswith(prefix):
            is_one = len(entry.chunks) == 1
            yield (
                name,
                files.view_chunk(entry.chunks[0], find_dtype(entry.dtype)) if is_one else ChunkedTensor(entry, files),
            )
