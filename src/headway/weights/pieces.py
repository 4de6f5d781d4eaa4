"""Tensors that are sharded across ranks: what this rank holds of each, and how all ranks together hold it.

A strategy yields DTensors, or, where its engine has none, a `ShardPiece` of its own making.
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
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from headway.errors import CheckpointError
from headway.weights.shards import TensorSpec

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Run = tuple[int, int]
"""From where to where along a dim."""


@dataclass(frozen=True)
class TensorBox:
    """A box of a tensor that lies on this rank.

    Attributes:
        offsets: where it begins in the whole.
        values: what is in it: a view of the rank's memory.
        is_written: does this rank write it into checkpoints? One rank does, of those that hold it.
    """

    offsets: tuple[int, ...]
    values: torch.Tensor
    is_written: bool


@dataclass(frozen=True)
class TensorSplit:
    """How a tensor is cut on all ranks: along each dim into runs; every box of the grid that they make has a writer.

    Attributes:
        sizes: along each dim, the lengths of the runs.
        writers: the rank that writes each box, in the order of rows.
    """

    sizes: tuple[tuple[int, ...], ...]
    writers: tuple[int, ...]

    @cached_property
    def starts(self) -> list[dict[int, int]]:
        """Along each dim, where each run begins: its number."""
        return [
            {begin: number for number, (begin, _) in enumerate(zip(accumulate(sizes, initial=0), sizes))}
            for sizes in self.sizes
        ]

    def boxes(self) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """(its writer, where it begins, its shape) of every box, in the grid's order."""
        along = [list(zip(starts, sizes)) for starts, sizes in zip(self.starts, self.sizes)]
        for place, writer in zip(product(*along), self.writers):
            yield writer, tuple(start for start, _ in place), tuple(size for _, size in place)

    @cached_property
    def numbers(self) -> dict[int, int]:
        """The number of the (last) box that each rank writes."""
        return {rank: number for number, rank in enumerate(self.writers)}

    @cached_property
    def rows(self) -> list[list[tuple[int, int]]]:
        """The sizes, equal ones in a row together."""
        return [[(size, len(list(run))) for size, run in groupby(sizes)] for sizes in self.sizes]

    @cached_property
    def steps(self) -> list[tuple[int, int, int]]:
        """The writers, those with equal steps of 1 or more between them in a row, as (first, step, how many)."""
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
    """What this rank holds of a tensor.

    Attributes:
        shape: of the whole.
        dtype: of its values.
        boxes: this rank's.
        local: the memory that they are views of, where there is one tensor of it.
        split: how the tensor is cut on all ranks, where every rank knows; None: only of its own boxes.
    """

    boxes: tuple[TensorBox, ...]
    local: torch.Tensor | None = None
    split: TensorSplit | None = None


def slices(begins: Sequence[int], sizes: Sequence[int], origin: Sequence[int] | None = None) -> tuple[slice, ...]:
    """A box within memory that begins at `origin`; None: at zero."""
    starts = [begin - start for begin, start in zip(begins, origin)] if origin is not None else begins
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes))


def is_dtensor(value: Any) -> "TypeGuard[DTensor]":
    """Is it a DTensor? Where nobody has imported them there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_spread(value: Any) -> bool:
    """Does a rank hold no more than a part of it, or a part with a place?"""
    return isinstance(value, ShardPiece) or is_dtensor(value)


def held(value: Any) -> torch.Tensor:
    """What this rank holds of a tensor, as a plain one."""
    if is_dtensor(value):
        local: torch.Tensor = value.detach().to_local()  # type: ignore[attr-defined]
        # What is cast as it is gathered (float8) lies in a tensor around the values.
        return local._tensor if hasattr(local, "fsdp_pre_all_gather") else local  # type: ignore[attr-defined]
    if isinstance(value, ShardPiece):
        if value.local is not None:
            return value.local
        return next((box.values for box in value.boxes), torch.empty(0, dtype=value.dtype))
    plain: torch.Tensor = value
    return plain


def inner_tensors(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors, and in place of one that wraps others (torchao's quantised ones) those."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            yield from inner_tensors(getattr(tensor, name) for name in names)
        else:
            yield tensor


def memory_of(value: Any) -> tuple[Any, ...]:
    """What two names of one tensor have in common, as long as both are held; a DTensor's own `data_ptr()` is 0.

    An empty shard has no address, but its storage is one object.
    """
    if is_spread(value) and not (isinstance(value, ShardPiece) and value.local is None and not value.boxes):
        local, storage = held(value), held(value).untyped_storage()
        where = (storage._cdata, local.storage_offset(), tuple(local.shape), tuple(local.stride()))
        placed = str(value.placements) if is_dtensor(value) else tuple(box.offsets for box in value.boxes)
        return (*where, tuple(value.shape), value.dtype, placed)
    if isinstance(value, torch.Tensor):
        return (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
    return (id(value),)  # nothing of it is here, or not in memory


# -------------------------------------------------------------------- where a DTensor's boxes lie


def runs_of(length: int, cuts: Sequence[tuple[int | None, int]]) -> dict[tuple[int, ...], list[Run]]:
    """What each coordinate holds of a dim that is cut several times.

    Args:
        length: of the dim.
        cuts: one after the other, (split factor of torch's `_StridedShard`, None: of `Shard`; number of ranks).
    """
    state: dict[tuple[int, ...], list[Run]] = {(): [(0, length)] if length else []}
    for factor, num in cuts:
        state = {
            (*coordinate, index): _merged(run for each in parts for run in each[index])
            for coordinate, runs in state.items()
            for parts in [[_chunks(part, num) for part in (_chunks(runs, factor) if factor else [runs])]]
            for index in range(num)
        }
    return state


def _chunks(runs: Sequence[Run], num: int) -> list[list[Run]]:
    """As torch.chunk cuts: equal ones, a shorter one, and empty ones."""
    size = -(-sum(stop - start for start, stop in runs) // num)
    made: list[list[Run]] = [[] for _ in range(num)]
    place = 0
    for start, stop in runs:
        while start < stop:
            index = place // size
            end = min(stop, start + (index + 1) * size - place)
            made[index].append((start, end))
            place, start = place + end - start, end
    return made


def _merged(runs: Iterable[Run]) -> list[Run]:
    made: list[Run] = []
    for start, stop in runs:
        if made and made[-1][1] == start:
            made[-1] = (made[-1][0], stop)
        else:
            made.append((start, stop))
    return made


def _cuts(tensor: "DTensor") -> list[list[tuple[int, int | None]]]:
    """For each dim of a DTensor, the dims of the mesh that cut it, with the split factor.

    Raises:
        CheckpointError: its values are sums that were not reduced yet.
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


def places(tensor: "DTensor") -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """(where it begins in the whole, where it lies in the local tensor) of each box that this rank holds of a DTensor.

    Raises:
        CheckpointError: the local tensor has another shape than its placements say.
    """
    coordinate, mesh = tensor.device_mesh.get_coordinate(), tensor.device_mesh
    if coordinate is None:
        return
    along = []
    for length, cuts in zip(tensor.shape, _cuts(tensor)):
        state = runs_of(length, [(factor, mesh.size(axis)) for axis, factor in cuts])
        along.append(state[tuple(coordinate[axis] for axis, _ in cuts)])
    shape, local = tuple(sum(stop - start for start, stop in runs) for runs in along), held(tensor)
    if prod(shape) != local.numel() or (local.numel() and shape != tuple(local.shape)):
        raise CheckpointError(
            f"a DTensor of shape {tuple(tensor.shape)} holds {tuple(local.shape)} here, where {tensor.placements} give {shape}"
        )
    for runs in product(*map(_with_places, along)):
        yield tuple(start for start, _ in runs), tuple(where for _, where in runs)


def _with_places(runs: Sequence[Run]) -> list[tuple[int, slice]]:
    ends = accumulate(stop - start for start, stop in runs)
    return [(start, slice(end - (stop - start), end)) for (start, stop), end in zip(runs, ends)]


def own_boxes(value: Any) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """(where it begins, its memory) of each box of a tensor that lies on this rank: of a plain one all of it."""
    if is_dtensor(value):
        local = held(value)
        return [(offsets, local[where]) for offsets, where in places(value)]
    if is_spread(value):
        return [(box.offsets, box.values) for box in value.boxes]
    return [((0,) * value.ndim, value)]


class ShardCutter:
    """Makes pieces of DTensors. Which of those that hold the same box writes it is the same on every rank: each in turn, by bytes."""

    def __init__(self) -> None:
        self._splits: dict[tuple[Any, ...], TensorSplit] = {}
        self._ranks: dict[int, tuple[Any, numpy.ndarray[Any, Any]]] = {}
        self._written: dict[int, list[int]] = {}

    def piece(self, tensor: "DTensor") -> ShardPiece:
        """This rank's piece.

        Raises:
            CheckpointError: its values are not reduced yet.
        """
        cuts, ranks = _cuts(tensor), self._ranks_of(tensor.device_mesh)
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
            self._splits[key] = _split(tensor, cuts, ordered.reshape(num_copies, *rest)[copy])
        split, local = self._splits[key], held(tensor)
        rank = tensor.device_mesh.get_rank()
        boxes = []
        for offsets, where in places(tensor):
            index = 0
            for start, known in zip(offsets, split.starts):
                index = index * len(known) + known[start]
            boxes.append(TensorBox(offsets, local[where], split.writers[index] == rank))
        return ShardPiece(tuple(tensor.shape), tensor.dtype, tuple(boxes), local, split)

    def _ranks_of(self, mesh: Any) -> "numpy.ndarray[Any, Any]":
        """Ranks by (copy, coordinate in the mesh): what lies in one mesh of several lies in all of them.

        A mesh may be a part of another: what is cut along its dims is repeated along the others, but for the stages of a pipeline.
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


def _split(
    tensor: "DTensor", cuts: Sequence[Sequence[tuple[int, int | None]]], ranks: "numpy.ndarray[Any, Any]"
) -> TensorSplit:
    """The grid of a tensor; `ranks` by the coordinates along the mesh's dims that cut it, in the mesh's order."""
    mesh = tensor.device_mesh
    order = sorted(axis for each in cuts for axis, _ in each)
    sizes: list[tuple[int, ...]] = []
    index: list[Any] = [0] * len(order)
    for dim, (length, each) in enumerate(zip(tensor.shape, cuts)):
        state = runs_of(length, [(factor, mesh.size(axis)) for axis, factor in each])
        found = sorted((run, coordinate) for coordinate, runs in state.items() for run in runs)
        sizes.append(tuple(stop - start for (start, stop), _ in found))
        for number, (axis, _) in enumerate(each):
            along = numpy.array([coordinate[number] for _, coordinate in found], dtype=numpy.int64)
            index[order.index(axis)] = along.reshape([-1 if other == dim else 1 for other in range(tensor.ndim)])
    shape = tuple(map(len, sizes))
    chosen = ranks[tuple(index)] if order else ranks
    return TensorSplit(tuple(sizes), tuple(int(rank) for rank in numpy.broadcast_to(chosen, shape).reshape(-1)))
