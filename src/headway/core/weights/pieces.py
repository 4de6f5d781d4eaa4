"""Tensors that are sharded across ranks: this rank's shards, and the division of the full tensor among ranks.

A box is a rectangular block of a tensor. A strategy provides DTensors or, if its backend does not use them,
`ShardPiece` objects.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, product
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy
import torch

from headway.core.weights import _torch
from headway.core.weights._torch import is_traceable_wrapper_subclass
from headway.core.weights.shards import TensorSpec
from headway.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

IndexRange = tuple[int, int]
"""Pair of (start, end) for a range of indices along a dim. The end is exclusive."""


@dataclass(frozen=True)
class TensorBox:
    """Rectangular block (box) of a sharded tensor that this rank holds.

    Attributes:
        offsets: First index of the box along each dim of the full tensor.
        values: View of this rank's memory with the box's values.
        is_written: Whether this rank writes the box into checkpoints. If several ranks hold it, exactly one writes it.
    """

    offsets: tuple[int, ...]
    values: torch.Tensor
    is_written: bool


@dataclass(frozen=True)
class TensorSplit:
    """Division of a tensor among all ranks, for checkpoints.

    The tensor is divided into a grid of rectangular blocks (boxes). Each box is written by one of the ranks that
    hold it.

    Attributes:
        sizes: For each dim, the lengths of the boxes along it.
        writers: Rank that writes each box, in row-major order.
    """

    sizes: tuple[tuple[int, ...], ...]
    writers: tuple[int, ...]

    @cached_property
    def positions_by_start(self) -> list[dict[int, int]]:
        """For each dim, a mapping from the first index of each box to the position of the box along the dim."""
        positions: list[dict[int, int]] = []
        for sizes in self.sizes:
            starts = list(accumulate(sizes, initial=0))[:-1]
            positions.append({start: position for position, start in enumerate(starts)})
        return positions

    def iterate_boxes(self) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Yield (writer, offsets, shape) for every box, in row-major order."""
        intervals = [list(zip(starts, sizes)) for starts, sizes in zip(self.positions_by_start, self.sizes)]
        for box, writer in zip(product(*intervals), self.writers):
            yield writer, tuple(start for start, _ in box), tuple(size for _, size in box)

    @cached_property
    def last_box_by_writer(self) -> dict[int, int]:
        """Mapping from each writing rank to the row-major index of the last box (block of the tensor) it writes."""
        return {rank: number for number, rank in enumerate(self.writers)}

    @cached_property
    def size_runs(self) -> list[list[tuple[int, int]]]:
        """Run-length encoding of `sizes`.

        For each dim, there are pairs of (length, number of consecutive boxes with this length).
        """
        return [[(size, len(list(run))) for size, run in groupby(sizes)] for sizes in self.sizes]

    @cached_property
    def writer_progressions(self) -> list[tuple[int, int, int]]:
        """Encoding of `writers` as arithmetic progressions, which are triples of (first, positive step, count)."""
        progressions: list[tuple[int, int, int]] = []
        for writer in self.writers:
            if progressions:
                first, step, count = progressions[-1]
                if count == 1 and writer > first:
                    progressions[-1] = (first, writer - first, 2)
                    continue
                if count > 1 and writer == first + step * count:
                    progressions[-1] = (first, step, count + 1)
                    continue
            progressions.append((writer, 1, 1))
        return progressions


@dataclass(frozen=True)
class ShardPiece(TensorSpec):
    """Shard of a tensor on this rank, for strategies whose tensors are not DTensors, and for checkpoints.

    Attributes:
        shape: Shape of the full tensor.
        dtype: Dtype of its values.
        boxes: Rectangular blocks of the tensor that this rank holds.
        local: Local tensor of which the boxes are views, if there is one.
        split: Division of the tensor among all ranks. None if this rank knows only its own boxes.
    """

    boxes: tuple[TensorBox, ...]
    local: torch.Tensor | None = None
    split: TensorSplit | None = None


def make_slices(begins: Sequence[int], sizes: Sequence[int], origin: Sequence[int] | None = None) -> tuple[slice, ...]:
    """Return slices that select a box (rectangular block) in a tensor.

    The tensor in memory can be a part of the full tensor.

    Args:
        begins: First index of the box along each dim of the full tensor.
        sizes: Length of the box along each dim.
        origin: Index in the full tensor of the first element in memory. None: zero in all dims.
    """
    starts = [begin - start for begin, start in zip(begins, origin)] if origin is not None else begins
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes))


def is_dtensor(value: Any) -> "TypeGuard[DTensor]":
    """Whether `value` is a DTensor. This function does not import torch.distributed.tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_sharded(value: Any) -> bool:
    """Whether a value has a type for sharded tensors: DTensor or `ShardPiece`."""
    return isinstance(value, ShardPiece) or is_dtensor(value)


def replace_local(like: "DTensor", local: torch.Tensor, stride: Sequence[int]) -> "DTensor":
    """Return a DTensor with the placements of `like` and the given local values.

    Args:
        like: DTensor whose placements and mesh are used.
        local: Local values of this rank.
        stride: Stride of the full tensor.
    """
    # `DTensor.from_local` would move offloaded values to the mesh's device.
    return _torch.build_like(like, local, stride)


def get_local_part(value: Any) -> torch.Tensor:
    """Return this rank's shard of a tensor as a plain tensor. A tensor that is not sharded is returned unchanged.

    For a `ShardPiece` without a local tensor, return its first box, or an empty tensor if it has no boxes.
    """
    if is_dtensor(value):
        local: torch.Tensor = value.detach().to_local()  # type: ignore[attr-defined]
        # A tensor that is cast while it is gathered (float8) wraps the tensor with the values.
        return _torch.read_inner_float8(local) if hasattr(local, "fsdp_pre_all_gather") else local
    if isinstance(value, ShardPiece):
        if value.local is not None:
            return value.local
        return next((box.values for box in value.boxes), torch.empty(0, dtype=value.dtype))
    plain: torch.Tensor = value
    return plain


def iterate_inner_tensors(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield plain tensors: the given ones, and the inner tensors in place of each wrapper subclass.

    For example, torchao's quantized tensors are wrapper subclasses.
    """
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            yield from iterate_inner_tensors(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        else:
            yield tensor


def split_wrappers(tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield pairs of (name, value), with the inner tensors in place of each wrapper, such as a quantized weight of torchao.

    An inner tensor's name begins with the name of its wrapper, as in `q_proj.weight.qdata`. DTensors are not split.
    """
    for name, tensor in tensors:
        # Nested tensors are also traceable wrappers, but are saved whole. Values that are not tensors have no
        # `is_nested`; the default of True keeps them as they are.
        if not getattr(tensor, "is_nested", True) and not is_dtensor(tensor) and is_traceable_wrapper_subclass(tensor):
            names = tensor.__tensor_flatten__()[0]
            yield from split_wrappers((f"{name}.{part}", getattr(tensor, part)) for part in names)
        else:
            yield name, tensor


def get_memory_key(value: Any) -> tuple[Any, ...]:
    """Return a key that identifies a tensor's memory. Two references to one tensor give equal keys while both exist.

    `data_ptr()` cannot be used, because it is 0 for a DTensor, and empty shards have no address. DTensors and shards
    are identified by their storage object instead.
    """
    if is_sharded(value) and not (isinstance(value, ShardPiece) and value.local is None and not value.boxes):
        local = get_local_part(value)
        storage_id = local.untyped_storage()._cdata
        layout = (storage_id, local.storage_offset(), tuple(local.shape), tuple(local.stride()))
        placement = str(value.placements) if is_dtensor(value) else tuple(box.offsets for box in value.boxes)
        return (*layout, tuple(value.shape), value.dtype, placement)
    if isinstance(value, torch.Tensor):
        return (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
    return (id(value),)  # no values on this rank, or not in memory


# -------------------------------------------------------------------- positions of a DTensor's boxes


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
                f"a DTensor of shape {tuple(tensor.shape)} is placed as {placement}: its ranks hold sums that were not reduced yet. "
                "Let state_dict() return tensor.redistribute(placements=[Replicate()])"
            )
    return cuts


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
            f"a DTensor of shape {tuple(tensor.shape)} holds {tuple(local.shape)} here, where {tensor.placements} give {shape}"
        )
    for box in product(*map(_pair_with_slices, own_ranges)):
        yield tuple(start for start, _ in box), tuple(local_slice for _, local_slice in box)


def _pair_with_slices(ranges: Sequence[IndexRange]) -> list[tuple[int, slice]]:
    """Return, for each index range, a pair of (its first index, slice of the local tensor that holds it)."""
    ends = accumulate(stop - start for start, stop in ranges)
    return [(start, slice(end - (stop - start), end)) for (start, stop), end in zip(ranges, ends)]


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


class ShardCutter:
    """Creator of `ShardPiece` objects from DTensors. It chooses which rank writes a box that several ranks hold.

    A box is a rectangular block of a tensor. All ranks make the same choices without communication, if they pass the
    tensors in the same order. The writes are divided among the replicas, balanced by bytes.
    """

    def __init__(self) -> None:
        self._splits: dict[tuple[Any, ...], TensorSplit] = {}
        """Splits by everything that determines them, because many tensors have equal ones."""
        self._ranks: dict[int, tuple[Any, numpy.ndarray[Any, Any]]] = {}
        """Pair of (mesh, result of `_list_ranks`) by the mesh's `id`. The mesh is kept, so that its `id` stays unique."""
        self._written_bytes: dict[int, list[int]] = {}
        """Bytes that each replica writes, by the number of replicas."""

    def cut_tensor(self, tensor: "DTensor") -> ShardPiece:
        """Return this rank's `ShardPiece` of a DTensor.

        Raises:
            CheckpointError: If the values are partial sums, or the local tensor's shape differs from the one that the
                placements imply.
        """
        cuts, ranks = list_cuts(tensor), self._list_ranks(tensor.device_mesh)
        sharding_axes = [axis for each in cuts for axis, _ in each]
        # Axes of `ranks`, whose first one is not a mesh dim. Ranks that differ only along them hold equal boxes.
        replica_axes = [axis for axis in range(1, ranks.ndim) if axis - 1 not in sharding_axes]
        num_replicas = ranks.shape[0] * prod(ranks.shape[axis] for axis in replica_axes)
        written_bytes = self._written_bytes.setdefault(num_replicas, [0] * num_replicas)
        replica = written_bytes.index(min(written_bytes))
        written_bytes[replica] += tensor.numel() * tensor.dtype.itemsize
        key = (id(tensor.device_mesh), tuple(tensor.shape), str(tensor.placements), replica)
        if key not in self._splits:
            ordered = numpy.moveaxis(ranks, replica_axes, range(1, len(replica_axes) + 1))
            rest = ordered.shape[len(replica_axes) + 1 :]
            self._splits[key] = _split_dtensor(tensor, cuts, ordered.reshape(num_replicas, *rest)[replica])
        split, local = self._splits[key], get_local_part(tensor)
        rank = tensor.device_mesh.get_rank()
        boxes = []
        for offsets, local_slices in iterate_boxes(tensor):
            index = 0  # row-major index of the box in the grid
            for start, positions in zip(offsets, split.positions_by_start):
                index = index * len(positions) + positions[start]
            boxes.append(TensorBox(offsets, local[local_slices], split.writers[index] == rank))
        return ShardPiece(tuple(tensor.shape), tensor.dtype, tuple(boxes), local, split)

    def _list_ranks(self, mesh: Any) -> "numpy.ndarray[Any, Any]":
        """Return the ranks that hold a tensor on a mesh, as an array indexed by (replica, coordinate in the mesh).

        The mesh can be part of a larger mesh. The tensor is then replicated along the larger mesh's other dims, except
        along pipeline stages.
        """
        if id(mesh) not in self._ranks:
            own_ranks, root = mesh.mesh.cpu().numpy(), mesh._get_root_mesh()
            all_ranks, names = root.mesh.cpu().numpy(), root.mesh_dim_names or ()
            coordinate_by_rank = {int(rank): coordinate for coordinate, rank in numpy.ndenumerate(all_ranks)}
            coordinates = numpy.array([coordinate_by_rank[int(rank)] for rank in own_ranks.reshape(-1)])
            coordinates = coordinates.reshape(own_ranks.size, all_ranks.ndim)
            # All ranks of this mesh have the same coordinate along these axes: the tensor is replicated along them.
            replica_axes = [
                axis
                for axis in range(all_ranks.ndim)
                if (coordinates[:, axis] == coordinates[0, axis]).all() and names[axis : axis + 1] != ("pp",)
            ]
            replicas = []
            for values in product(*(range(all_ranks.shape[axis]) for axis in replica_axes)):
                moved = coordinates.copy()
                moved[:, replica_axes] = values
                replicas.append(all_ranks[tuple(moved.T)].reshape(own_ranks.shape))
            self._ranks[id(mesh)] = mesh, numpy.stack(replicas)
        _, ranks = self._ranks[id(mesh)]
        return ranks


def _split_dtensor(
    tensor: "DTensor", cuts: Sequence[Sequence[tuple[int, int | None]]], ranks: "numpy.ndarray[Any, Any]"
) -> TensorSplit:
    """Return the division of a DTensor among ranks as a grid of rectangular blocks.

    Args:
        tensor: The DTensor.
        cuts: For each dim, the mesh dims that shard it, as pairs of (mesh dim, split factor of torch's `_StridedShard`
            or None).
        ranks: Ranks indexed by the coordinates along the sharding mesh dims, in the mesh's order.
    """
    mesh = tensor.device_mesh
    sharding_axes = sorted(axis for each in cuts for axis, _ in each)
    sizes: list[tuple[int, ...]] = []
    # For each sharding mesh dim, the coordinate of each box along it, in an array that broadcasts to the grid of boxes.
    coordinates: list[Any] = [0] * len(sharding_axes)
    for dim, (length, dim_cuts) in enumerate(zip(tensor.shape, cuts)):
        ranges_by_coordinate = compute_ranges(length, [(factor, mesh.size(axis)) for axis, factor in dim_cuts])
        in_order = sorted((each, coordinate) for coordinate, ranges in ranges_by_coordinate.items() for each in ranges)
        sizes.append(tuple(stop - start for (start, stop), _ in in_order))
        for number, (axis, _) in enumerate(dim_cuts):
            along_dim = numpy.array([coordinate[number] for _, coordinate in in_order], dtype=numpy.int64)
            grid_shape = [-1 if other == dim else 1 for other in range(tensor.ndim)]
            coordinates[sharding_axes.index(axis)] = along_dim.reshape(grid_shape)
    writers = ranks[tuple(coordinates)] if sharding_axes else ranks
    writers = numpy.broadcast_to(writers, tuple(map(len, sizes)))
    return TensorSplit(tuple(sizes), tuple(int(rank) for rank in writers.reshape(-1)))
