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
from headway.core.checkpoint.stores.protocol import CheckpointDownload
from headway.core.weights.files import StoredTensor, map_safetensors
from headway.core.weights.pieces import (
    get_local_part,
    is_dtensor,
    is_sharded,
    iterate_boxes,
    list_own_boxes,
    make_slices,
    replace_local,
)
from headway.core.weights.shards import TensorOffsets, find_dtype, view_as_bits

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
        self._open: dict[str, Mapping[str, StoredTensor]] = {}
        self._paths: dict[str, Path] = {}

    def open_file(self, file: str) -> Mapping[str, StoredTensor]:
        """Map a file, and return its tensors by key. Their values are not read yet.

        Raises:
            CheckpointError: If the file's length differs from the one in the manifest, or the file violates the format.
        """
        tensors = self._open.pop(file, None)
        if tensors is None:
            check_file(self._folder / file, self._manifest.files[file])
            tensors, _ = map_safetensors(self._folder / file)
            if len(self._open) >= _MOST_OPEN:
                del self._open[next(iter(self._open))]
        self._open[file] = tensors  # moved to the end: evicted last
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
    if is_sharded(own) or isinstance(saved, ChunkedTensor):
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
        """
        entry = self._manifest.tensors[name]
        for chunk in iterate_overlapping(entry.chunks, offsets, shape):
            file, dtype = chunk.file, find_dtype(entry.dtype)
            path = self._folder / file
            if file not in self._headers:
                header_path = path if self._download is None else self._download.download_header(file)
                header = self._headers[file] = read_file_header(header_path)
                header_end = min((start for _, start in header.values()), default=1)
                self.ranges.setdefault(file, []).append((0, header_end))
            start = find_tensor_offset(self._headers[file], path, chunk.key, dtype, chunk.shape)
            first = last = 0  # row-major indices of the box's first and last element in the chunk
            for begin, size, origin, length in zip(*intersect_box(chunk, offsets, shape), chunk.offsets, chunk.shape):
                first = first * length + begin - origin
                last = last * length + begin - origin + size - 1
            self.ranges[file].append((start + first * dtype.itemsize, start + (last + 1) * dtype.itemsize))


class TargetLayout:
    """Layout into which a checkpoint is loaded: how this run shards each saved tensor.

    Args:
        objects: Objects that should load the checkpoint.
        rank: Rank of this process. Default: 0.
        world_size: Number of ranks of the run. Default: 1.
    """

    def __init__(self, objects: StatefulObjects, rank: int = 0, world_size: int = 1) -> None:
        self._rank = rank
        self._world_size = world_size
        self._weights: dict[str, Any] = {
            to_logical_name(f"model/{index}/{name}"): value
            for index, model in objects.list_models_to_load()
            for name, value in objects.export(model)
            if is_sharded(value)
        }
        names = map_parameter_names(objects.models)
        self._parameters: dict[str, Any] = {}
        for index, optimizer in enumerate(objects.optimizers):
            for group, keys in zip(optimizer.param_groups, list_parameter_keys(optimizer, names)):
                for parameter, key in zip(group["params"], keys):
                    part = objects.get_part(parameter)
                    if is_sharded(part):
                        self._parameters[f"optimizer/{index}/{key}"] = part
        # Sharded tensors in the states of the other objects, by the names under which a save would store them.
        tensors: dict[str, Any] = {}
        for kind, objects_of_kind in objects.others.items() if self._weights or self._parameters else ():
            for index, obj in enumerate(objects_of_kind):
                with suppress(Exception):  # a state that cannot be saved now may still be loaded
                    encode_value(obj.state_dict(), f"{kind}/{index}", tensors)
        self._state = {name: each for name, each in tensors.items() if is_sharded(each)}

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
                name: [describe_row(shape, self._rank)]
                for name, shape in rows.items()
                if shape[:1] == (self._world_size,)
            }
        targets: dict[str, list[Any]] = {}
        for name in (*shapes, *aliases):
            if name in self._weights:
                targets.setdefault(aliases.get(name, name), []).append(self._weights[name])
        for name, shape in shapes.items():
            own = self._state.get(name, self._find_parameter(name))
            if own is not None and tuple(own.shape) == shape:
                targets[name] = [own]
        return targets

    def _find_parameter(self, name: str) -> Any:
        """Return this rank's part of the sharded parameter to which an optimizer's tensor belongs, or None."""
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
    download = find_store(folder).prepare_download(manifest)
    if download is not None:
        folder, is_verified = download.folder, False
    if targets or download is not None:
        used = UsedRanges(folder, manifest, download)
        used.add_shards(targets)
        if download is not None:
            rows_of_others = [name for name in shapes if name.startswith(ROWS) and name not in targets]
            used.add_all_except([*targets, *rows_of_others])
            download.download_ranges(used.ranges)
        else:
            if is_verified:
                used.add_all_except(targets)
            verify_ranges(folder, manifest, used.ranges)
    owned_names = [
        name
        for name, entry in manifest.tensors.items()
        if len(entry.chunks) == 1 and not name.startswith((MODEL, ROWS)) and name not in targets
    ]
    # Ranges that are used have been verified above if anything is sharded. Otherwise all bytes are verified here.
    tensors: dict[str, Any] = dict(
        read_owned(folder, manifest, owned_names, is_verified and not targets, skips_other_files=bool(targets))
    )
    files = CheckpointFiles(folder, manifest, download)
    for name, entry in manifest.tensors.items():
        if name in tensors or (name.startswith(ROWS) and name not in targets):
            continue
        stored, is_model = ChunkedTensor(entry, files), name.startswith(MODEL)
        if name in targets:
            target = targets[name][0]
            # A tensor of another shape stays in its files, and is refused before it would be copied.
            stays_in_files = is_model or stored.shape != target.shape
            tensors[name] = stored if stays_in_files else read_sharded_like(target, stored)
        elif len(entry.chunks) == 1:
            tensors[name] = files.view_chunk(entry.chunks[0], stored.dtype)
        else:
            tensors[name] = stored if is_model and layout is not None else stored.assemble()
    in_order = {name: tensors[name] for name in manifest.tensors if name in tensors}
    return in_order, {name for name in tensors if not name.startswith(MODEL)}


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
