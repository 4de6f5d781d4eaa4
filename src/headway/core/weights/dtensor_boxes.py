"""Find the boxes (rectangular blocks) of a sharded tensor that this rank holds, from the placements of a DTensor."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, product
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from headway.core.weights.pieces import get_local_part, is_dtensor, is_sharded
from headway.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


IndexRange = tuple[int, int]
"""Pair of (start, end) for a range of indices along a dim. The end is exclusive."""


def list_own_boxes(value: Any) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Return the boxes (rectangular blocks) of a tensor that this rank holds, as pairs of (offsets, values).

    The offsets are those in the full tensor, and the values are views. A tensor that is not sharded is one box.

    Raises:
        CheckpointError: If a DTensor holds partial sums, or its local shape contradicts its placements.
    """
    if is_dtensor(value):
        local = get_local_part(value)
        return [(offsets, local[where]) for offsets, where in iterate_boxes(value)]
    if is_sharded(value):
        return [(box.offsets, box.values) for box in value.boxes]
    return [((0,) * value.ndim, value)]


def iterate_boxes(tensor: "DTensor") -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Yield the rectangular blocks (boxes) of a DTensor that this rank holds. Yield nothing outside of its mesh.

    Yields:
        Pairs of (offsets in the full tensor, slices of the local tensor).

    Raises:
        CheckpointError: If the values are partial sums, or the local tensor's shape differs from the one that the
            placements imply.
    """
    coordinate, mesh = tensor.device_mesh.get_coordinate(), tensor.device_mesh
    if coordinate is None:
        return
    own_ranges: list[list[IndexRange]] = []
    for length, cuts in zip(tensor.shape, list_cuts(tensor)):
        ranges_by_coordinate = compute_ranges(length, [(factor, mesh.size(axis)) for axis, factor in cuts])
        own_ranges.append(ranges_by_coordinate[tuple(coordinate[axis] for axis, _ in cuts)])
    local = get_local_part(tensor)
    shape = tuple(sum(stop - start for start, stop in ranges) for ranges in own_ranges)
    if prod(shape) != local.numel() or (local.numel() and shape != tuple(local.shape)):
        raise CheckpointError(
            f"a DTensor of shape {tuple(tensor.shape)} has a local shard of shape {tuple(local.shape)}, but "
            f"{tensor.placements} require {shape}"
        )
    for box in product(*map(_pair_with_slices, own_ranges)):
        yield tuple(start for start, _ in box), tuple(local_slice for _, local_slice in box)


def _pair_with_slices(ranges: Sequence[IndexRange]) -> list[tuple[int, slice]]:
    """Return, for each index range, a pair of (its first index, slice of the local tensor that holds it)."""
    ends = accumulate(stop - start for start, stop in ranges)
    return [(start, slice(end - (stop - start), end)) for (start, stop), end in zip(ranges, ends)]


def list_cuts(tensor: "DTensor") -> list[list[tuple[int, int | None]]]:
    """Return the mesh dims that shard each dim of a DTensor.

    Returns:
        For each dim, pairs of (mesh dim, split factor of torch's `_StridedShard` or None).

    Raises:
        CheckpointError: If the values are partial sums.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    cuts: list[list[tuple[int, int | None]]] = [[] for _ in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard | _StridedShard):
            factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else None
            cuts[placement.dim % tensor.ndim].append((axis, factor))
        elif not isinstance(placement, Replicate):
            raise CheckpointError(
                f"a DTensor of shape {tuple(tensor.shape)} is placed as {placement}: its ranks have sums that were not reduced yet. "
                "Let state_dict() return tensor.redistribute(placements=[Replicate()])"
            )
    return cuts


def compute_ranges(length: int, cuts: Sequence[tuple[int | None, int]]) -> dict[tuple[int, ...], list[IndexRange]]:
    """Return each mesh coordinate's index ranges along a dim that is sharded over mesh axes.

    Args:
        length: Length of the dim.
        cuts: Pairs of (split factor, number of ranks), one per mesh axis that shards the dim, in the order in which the
            axes split it. The split factor is that of torch's `_StridedShard`, or None for `Shard`.

    Returns:
        Index ranges by coordinate. A coordinate has one index per mesh axis in `cuts`.
    """
    ranges_by_coordinate: dict[tuple[int, ...], list[IndexRange]] = {(): [(0, length)] if length else []}
    for split_factor, num_ranks in cuts:
        previous, ranges_by_coordinate = ranges_by_coordinate, {}
        for coordinate, ranges in previous.items():
            # `_StridedShard` first splits the dim into `split_factor` parts. Each rank gets a chunk of every part.
            parts = _chunk_ranges(ranges, split_factor) if split_factor else [ranges]
            chunks_by_part = [_chunk_ranges(part, num_ranks) for part in parts]
            for index in range(num_ranks):
                own_ranges = (each for chunks in chunks_by_part for each in chunks[index])
                longer_coordinate = (*coordinate, index)
                ranges_by_coordinate[longer_coordinate] = _merge_ranges(own_ranges)
    return ranges_by_coordinate


def _chunk_ranges(ranges: Sequence[IndexRange], num_chunks: int) -> list[list[IndexRange]]:
    """Split index ranges into chunks like `torch.chunk`: equal chunks, then a shorter one, then empty ones.

    Args:
        ranges: Index ranges, which are treated as one sequence of indices.
        num_chunks: Number of chunks.
    """
    chunk_size = -(-sum(stop - start for start, stop in ranges) // num_chunks)
    chunks: list[list[IndexRange]] = [[] for _ in range(num_chunks)]
    position = 0  # in the sequence of all indices
    for start, stop in ranges:
        while start < stop:
            index = position // chunk_size
            end = min(stop, start + (index + 1) * chunk_size - position)
            chunks[index].append((start, end))
            position, start = position + end - start, end
    return chunks


def _merge_ranges(ranges: Iterable[IndexRange]) -> list[IndexRange]:
    """Join each range with the previous one if it begins where that one ends."""
    merged: list[IndexRange] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged
