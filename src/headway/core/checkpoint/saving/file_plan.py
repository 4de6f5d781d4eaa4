"""Plan the files of a checkpoint: which rank writes which tensors, and the manifest's entries for sharded tensors.

The unsharded tensors are divided among the ranks. Of a sharded tensor, each rank writes its own boxes. A box is a
rectangular block of a tensor.

The placements of a DTensor determine how it is split, so every rank knows the grid of all boxes. Therefore the rank that
commits the checkpoint needs no list of boxes from other ranks. It only needs a hash, which shows that they have computed
the same grid. For shards that are not DTensors, each rank knows only its own boxes and sends a list of them.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from headway.common.garbage import pause_garbage_collection
from headway.core.checkpoint.format.chunks import ChunkGrid, TensorChunk, make_file_name
from headway.core.checkpoint.format.entries import TensorEntry
from headway.core.weights.pieces import ShardPiece, TensorSplit
from headway.core.weights.tensor_bytes import get_dtype_name
from headway.errors import CheckpointError


def partition_by_size(sizes: Mapping[str, int], num_parts: int) -> list[list[str]]:
    """Split tensor names, in order, into `num_parts` consecutive lists of about equal total size in bytes.

    Args:
        sizes: Sizes of the tensors in bytes, by name.
        num_parts: Number of lists.
    """
    total, done = sum(sizes.values()), 0
    parts: list[list[str]] = [[] for _ in range(num_parts)]
    for name, size in sizes.items():
        # Assigned by the middle of the tensor, so that rounding leaves no part empty.
        index = min(num_parts - 1, (2 * done + size) * num_parts // (2 * total)) if total else 0
        parts[index].append(name)
        done += size
    return parts


@pause_garbage_collection()
def plan_files(tensors: Mapping[str, torch.Tensor | ShardPiece], num_parts: int) -> list[dict[str, list[str]]]:
    """Distribute the unsharded tensors over the parts of a checkpoint, and over the files of each part.

    Tensors whose names begin with different components, such as `model/` and `optimizer/`, are in different files.

    Args:
        tensors: The state to save, by name. Sharded tensors are skipped.
        num_parts: Number of parts. Each part is written by one rank.

    Returns:
        For each part, a mapping from file names to names of tensors.
    """
    plan: list[dict[str, list[str]]] = []
    sizes = {
        name: tensor.numel() * tensor.element_size()
        for name, tensor in tensors.items()
        if not isinstance(tensor, ShardPiece)
    }
    for index, names in enumerate(partition_by_size(sizes, num_parts)):
        files: dict[str, list[str]] = {}
        for name in names:
            files.setdefault(make_file_name(_make_file_pattern(name), index), []).append(name)
        plan.append(files)
    return plan


class OwnBoxes(NamedTuple):
    """Boxes of sharded tensors that one rank writes.

    Attributes:
        files: For each file name, pairs of (key in the file, values of the box).
        summary: JSON description of the boxes, for the rank that commits the checkpoint.
    """

    files: dict[str, list[tuple[str, torch.Tensor]]]
    summary: dict[str, Any]


def plan_own_boxes(tensors: Mapping[str, Any], part: int) -> OwnBoxes:
    """Return the boxes of sharded tensors that this rank writes, with their files and keys.

    Args:
        tensors: The state to save, by name. Unsharded tensors are skipped.
        part: Number of the part of the checkpoint that this rank writes. The file names contain it.

    Raises:
        CheckpointError: If the local layout of a tensor contradicts its placements.
    """
    files: dict[str, list[tuple[str, torch.Tensor]]] = {}
    listed: dict[str, list[list[Any]]] = {}
    for name, piece in _select_pieces(tensors).items():
        file = make_file_name(_make_file_pattern(name), part)
        own = [box for box in piece.boxes if box.is_written and box.values.numel()]
        if piece.split is not None:
            keys = {chunk.offsets: chunk.key for chunk in _list_own_chunks(name, piece.split, tensors, file, part)}
            if keys.keys() != {box.offsets for box in own}:
                raise CheckpointError(f"{name} is laid out on this rank differently from its placements")
            values = [(keys[box.offsets], box.values) for box in own]
        else:
            values = [(_make_box_key(name, number, tensors), box.values) for number, box in enumerate(own)]
            listed[name] = [[box.offsets, tuple(box.values.shape), file, key] for box, (key, _) in zip(own, values)]
        if values:
            files.setdefault(file, []).extend(values)
    return OwnBoxes(files, {"grids": _compute_split_digest(tensors), "boxes": listed})


def make_sharded_entries(tensors: Mapping[str, Any], summaries: Sequence[Mapping[str, Any]]) -> dict[str, TensorEntry]:
    """Return the manifest's entries for the sharded tensors, by name.

    Args:
        tensors: The state to save, by name, on the rank that commits.
        summaries: One `OwnBoxes.summary` per part of the checkpoint.

    Raises:
        CheckpointError: If ranks have different sharded tensors or placements.
    """
    differing = [part for part, each in enumerate(summaries) if each["grids"] != summaries[0]["grids"]]
    if differing:
        raise CheckpointError(
            f"rank {differing[0]} has different sharded tensors or placements than rank 0: a checkpoint needs the same model "
            "and optimizer, sharded in the same way, on every rank"
        )
    listed: dict[str, list[TensorChunk]] = {}
    for each in summaries:
        for name, boxes in each["boxes"].items():
            chunks = [TensorChunk(tuple(offsets), tuple(shape), file, key) for offsets, shape, file, key in boxes]
            listed.setdefault(name, []).extend(chunks)
    return {
        name: _make_entry(name, piece, piece.split, tensors)
        if piece.split is not None
        else TensorEntry(piece.shape, get_dtype_name(piece.dtype), tuple(listed.get(name, ())))
        for name, piece in _select_pieces(tensors).items()
    }


def _make_file_pattern(name: str) -> str:
    """Return the name pattern of the files that hold a tensor.

    The pattern contains `*` in place of the part number of the writing rank.

    Args:
        name: Name of the tensor.
    """
    return f"{name.split('/', 1)[0]}-*.safetensors"


def _select_pieces(tensors: Mapping[str, Any]) -> dict[str, ShardPiece]:
    """Return the sharded tensors by name."""
    return {name: each for name, each in tensors.items() if isinstance(each, ShardPiece)}


def _list_own_chunks(
    name: str, split: TensorSplit, tensors: Mapping[str, Any], file: str, part: int
) -> list[TensorChunk]:
    """Return the chunks of a sharded tensor that are in one file.

    Args:
        name: Name of the tensor.
        split: Division of the tensor among ranks.
        tensors: Tensors of the checkpoint by name.
        file: Name of the file.
        part: Number of the file, which is that of the rank that writes it.
    """
    if _has_one_box_per_writer(split):
        number = split.last_box_by_writer.get(part)
        return [] if number is None else [_make_chunk_grid(name, split)[number]]
    return [chunk for chunk in _make_chunks(name, split, tensors) if chunk.file == file]


def _has_one_box_per_writer(split: TensorSplit) -> bool:
    """Whether each rank writes at most one box (rectangular block) of a tensor.

    Args:
        split: How the tensor is split among the ranks.
    """
    return len(split.last_box_by_writer) == len(split.writers)


def _make_chunk_grid(name: str, split: TensorSplit) -> ChunkGrid:
    """Return the chunks of a sharded tensor of which each rank writes one box."""
    return ChunkGrid(name, split.size_runs, _make_file_pattern(name), split.writer_progressions)


def _make_chunks(name: str, split: TensorSplit, tensors: Mapping[str, Any]) -> Iterator[TensorChunk]:
    """Yield one chunk for each box (rectangular block) of a tensor of which some rank writes several boxes.

    A chunk describes the box, its file, and its key in the file.

    Args:
        name: Name of the tensor.
        split: How the tensor is split among the ranks.
        tensors: The state to save, by name. Keys of boxes must differ from these names.
    """
    for number, (writer, offsets, shape) in enumerate(split.iterate_boxes()):
        yield TensorChunk(
            offsets, shape, make_file_name(_make_file_pattern(name), writer), _make_box_key(name, number, tensors)
        )


def _make_box_key(name: str, number: int, tensors: Mapping[str, Any]) -> str:
    """Return the key under which a file stores a box (rectangular block) of a tensor.

    The key differs from the names of all tensors.

    Args:
        name: Name of the tensor.
        number: Number of the box in the tensor.
        tensors: Tensors of the checkpoint by name.
    """
    key = f"{name}@{number}"
    while key in tensors:
        key += "@"
    return key


def _make_entry(name: str, piece: ShardPiece, split: TensorSplit, tensors: Mapping[str, Any]) -> TensorEntry:
    """Return the manifest's entry of a sharded tensor whose split is known to every rank.

    Args:
        name: Name of the tensor.
        piece: This rank's part of the tensor.
        split: Division of the tensor among ranks.
        tensors: Tensors of the checkpoint by name.
    """
    chunks = (
        _make_chunk_grid(name, split) if _has_one_box_per_writer(split) else tuple(_make_chunks(name, split, tensors))
    )
    return TensorEntry(piece.shape, get_dtype_name(piece.dtype), chunks)


def _compute_split_digest(tensors: Mapping[str, Any]) -> str:
    """Return a hash of the shapes, dtypes and grids of all tensors whose split is known to every rank."""
    entries = {
        name: _make_entry(name, each, each.split, tensors).encode()
        for name, each in _select_pieces(tensors).items()
        if each.split is not None
    }
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
