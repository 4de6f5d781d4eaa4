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
    def starts(self) -> list[dict[int, int]]:
        """For each dim, a mapping from the first index of each box to the position of the box along the dim."""
        return [
            {begin: number for number, (begin, _) in enumerate(zip(accumulate(sizes, initial=0), sizes))}
            for sizes in self.sizes
        ]

    def iterate_boxes(self) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Yield (writer, offsets, shape) for every box, in row-major order."""
        along = [list(zip(starts, sizes)) for starts, sizes in zip(self.starts, self.sizes)]
        for place, writer in zip(product(*along), self.writers):
            yield writer, tuple(start for start, _ in place), tuple(size for _, size in place)

    @cached_property
    def numbers(self) -> dict[int, int]:
        """Mapping from each writing rank to the row-major index of the last box (block of the tensor) it writes."""
        return {rank: number for number, rank in enumerate(self.writers)}

    @cached_property
    def rows(self) -> list[list[tuple[int, int]]]:
        """Run-length encoding of `sizes`.

        For each dim, there are pairs of (length, number of consecutive boxes with this length).
        """
        return [[(size, len(list(run))) for size, run in groupby(sizes)] for sizes in self.sizes]

    @cached_property
    def steps(self) -> list[tuple[int, int, int]]:
        """Encoding of `writers` as arithmetic progressions, which are triples of (first, positive step, count)."""
        made: list[tuple[int, int, int]] = []
        for value in self.writers:
            if made:
                first, step, count = made[-1]
                if count == 1 and value > first:
                    made[-1] = (first, value - first, 2)
                    continue
                if count > 1 and value == first + step * count:
                    made[-1] = (first, step, count + 1)
                    continue
            made.append((value, 1, 1))
        return made


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


def is_spread(value: Any) -> bool:
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
    if is_spread(value) and not (isinstance(value, ShardPiece) and value.local is None and not value.boxes):
        local, storage = get_local_part(value), get_local_part(value).untyped_storage()
        where = (storage._cdata, local.storage_offset(), tuple(local.shape), tuple(local.stride()))
        placed = str(value.placements) if is_dtensor(value) else tuple(box.offsets for box in value.boxes)
        return (*where, tuple(value.shape), value.dtype, placed)
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
    state: dict[tuple[int, ...], list[IndexRange]] = {(): [(0, length)] if length else []}
    for factor, num in cuts:
        state = {
            (*coordinate, index): _merge_ranges(run for each in parts for run in each[index])
            for coordinate, runs in state.items()
            for parts in [[_chunk_ranges(part, num) for part in (_chunk_ranges(runs, factor) if factor else [runs])]]
            for index in range(num)
        }
    return state


def _chunk_ranges(runs: Sequence[IndexRange], num: int) -> list[list[IndexRange]]:
    """Split index ranges into `num` chunks like `torch.chunk`: equal chunks, then a shorter one, then empty ones.

    Args:
        runs: Index ranges, which are treated as one sequence of indices.
        num: Number of chunks.
    """
    size = -(-sum(stop - start for start, stop in runs) // num)
    made: list[list[IndexRange]] = [[] for _ in range(num)]
    place = 0
    for start, stop in runs:
        while start < stop:
            index = place // size
            end = min(stop, start + (index + 1) * size - place)
            made[index].append((start, end))
            place, start = place + end - start, end
    return made


def _merge_ranges(runs: Iterable[IndexRange]) -> list[IndexRange]:
    made: list[IndexRange] = []
    for start, stop in runs:
        if made and made[-1][1] == start:
            made[-1] = (made[-1][0], stop)
        else:
            made.append((start, stop))
    return made


def list_cuts(tensor: "DTensor") -> list[list[tuple[int, int | None]]]:
    """Return the mesh dims that shard each dim of a DTensor.

    Returns:
        For each dim, pairs of (mesh dim, split factor of torch's `_StridedShard` or None).

    Raises:
        CheckpointError: If the values are partial sums.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    found: list[list[tuple[int, int | None]]] = [[] for _ in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard | _StridedShard):
            factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else None
            found[placement.dim % tensor.ndim].append((axis, factor))
        elif not isinstance(placement, Replicate):
            raise CheckpointError(
                f"a DTensor of shape {tuple(tensor.shape)} is placed as {placement}: its ranks hold sums that were not reduced yet. "
                "Let state_dict() return tensor.redistribute(placements=[Replicate()])"
            )
    return found


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
    along = []
    for length, cuts in zip(tensor.shape, list_cuts(tensor)):
        state = compute_ranges(length, [(factor, mesh.size(axis)) for axis, factor in cuts])
        along.append(state[tuple(coordinate[axis] for axis, _ in cuts)])
    shape, local = tuple(sum(stop - start for start, stop in runs) for runs in along), get_local_part(tensor)
    if prod(shape) != local.numel() or (local.numel() and shape != tuple(local.shape)):
        raise CheckpointError(
            f"a DTensor of shape {tuple(tensor.shape)} holds {tuple(local.shape)} here, where {tensor.placements} give {shape}"
        )
    for runs in product(*map(_with_places, along)):
        yield tuple(start for start, _ in runs), tuple(where for _, where in runs)


def _with_places(runs: Sequence[IndexRange]) -> list[tuple[int, slice]]:
    ends = accumulate(stop - start for start, stop in runs)
    return [(start, slice(end - (stop - start), end)) for (start, stop), end in zip(runs, ends)]


def list_own_boxes(value: Any) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Return the boxes (rectangular blocks) of a tensor that this rank holds, as pairs of (offsets, values).

    The offsets are those in the full tensor, and the values are views. A tensor that is not sharded is one box.

    Raises:
        CheckpointError: If a DTensor holds partial sums, or its local shape contradicts its placements.
    """
    if is_dtensor(value):
        local = get_local_part(value)
        return [(offsets, local[where]) for offsets, where in iterate_boxes(value)]
    if is_spread(value):
        return [(box.offsets, box.values) for box in value.boxes]
    return [((0,) * value.ndim, value)]


class ShardCutter:
    """Creator of `ShardPiece` objects from DTensors. It chooses which rank writes a box that several ranks hold.

    A box is a rectangular block of a tensor. All ranks make the same choices without communication, if they pass the
    tensors in the same order. The writes are divided among the replicas, balanced by bytes.
    """

    def __init__(self) -> None:
        self._splits: dict[tuple[Any, ...], TensorSplit] = {}
        self._ranks: dict[int, tuple[Any, numpy.ndarray[Any, Any]]] = {}
        self._written: dict[int, list[int]] = {}

    def cut_tensor(self, tensor: "DTensor") -> ShardPiece:
        """Return this rank's `ShardPiece` of a DTensor.

        Raises:
            CheckpointError: If the values are partial sums, or the local tensor's shape differs from the one that the
                placements imply.
        """
        cuts, ranks = list_cuts(tensor), self._list_ranks(tensor.device_mesh)
        cutting = [axis for each in cuts for axis, _ in each]
        copies = [axis for axis in range(1, ranks.ndim) if axis - 1 not in cutting]
        num_copies = ranks.shape[0] * prod(ranks.shape[axis] for axis in copies)
        written = self._written.setdefault(num_copies, [0] * num_copies)
        copy = written.index(min(written))
        written[copy] += tensor.numel() * tensor.dtype.itemsize
        key = (id(tensor.device_mesh), tuple(tensor.shape), str(tensor.placements), copy)
        if key not in self._splits:
            ordered = numpy.moveaxis(ranks, copies, range(1, len(copies) + 1))
            rest = ordered.shape[len(copies) + 1 :]
            self._splits[key] = _split_dtensor(tensor, cuts, ordered.reshape(num_copies, *rest)[copy])
        split, local = self._splits[key], get_local_part(tensor)
        rank = tensor.device_mesh.get_rank()
        boxes = []
        for offsets, where in iterate_boxes(tensor):
            index = 0
            for start, known in zip(offsets, split.starts):
                index = index * len(known) + known[start]
            boxes.append(TensorBox(offsets, local[where], split.writers[index] == rank))
        return ShardPiece(tuple(tensor.shape), tensor.dtype, tuple(boxes), local, split)

    def _list_ranks(self, mesh: Any) -> "numpy.ndarray[Any, Any]":
        """Return the ranks that hold a tensor on a mesh, as an array indexed by (replica, coordinate in the mesh).

        The mesh can be part of a larger mesh. The tensor is then replicated along the larger mesh's other dims, except
        along pipeline stages.
        """
        found = self._ranks.get(id(mesh))
        if found is None:
            own, root = mesh.mesh.cpu().numpy(), mesh._get_root_mesh()
            whole, names = root.mesh.cpu().numpy(), root.mesh_dim_names or ()
            places = {int(rank): place for place, rank in numpy.ndenumerate(whole)}
            within = numpy.array([places[int(rank)] for rank in own.reshape(-1)]).reshape(own.size, whole.ndim)
            fixed = [
                axis
                for axis in range(whole.ndim)
                if (within[:, axis] == within[0, axis]).all() and names[axis : axis + 1] != ("pp",)
            ]
            copies = []
            for values in product(*(range(whole.shape[axis]) for axis in fixed)):
                moved = within.copy()
                moved[:, fixed] = values
                copies.append(whole[tuple(moved.T)].reshape(own.shape))
            found = self._ranks[id(mesh)] = mesh, numpy.stack(copies)
        return found[1]


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
    order = sorted(axis for each in cuts for axis, _ in each)
    sizes: list[tuple[int, ...]] = []
    index: list[Any] = [0] * len(order)
    for dim, (length, each) in enumerate(zip(tensor.shape, cuts)):
        state = compute_ranges(length, [(factor, mesh.size(axis)) for axis, factor in each])
        found = sorted((run, coordinate) for coordinate, runs in state.items() for run in runs)
        sizes.append(tuple(stop - start for (start, stop), _ in found))
        for number, (axis, _) in enumerate(each):
            along = numpy.array([coordinate[number] for _, coordinate in found], dtype=numpy.int64)
            index[order.index(axis)] = along.reshape([-1 if other == dim else 1 for other in range(tensor.ndim)])
    shape = tuple(map(len, sizes))
    chosen = ranks[tuple(index)] if order else ranks
    return TensorSplit(tuple(sizes), tuple(int(rank) for rank in numpy.broadcast_to(chosen, shape).reshape(-1)))
