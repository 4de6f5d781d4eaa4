"""Tensors that are sharded across ranks: this rank's shards, and the division of the full tensor among ranks.

A box is a rectangular block of a tensor. A strategy provides DTensors or, if its backend does not use them,
`ShardPiece` objects.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, product
from typing import TYPE_CHECKING, Any

import torch

from headway.common.dtensors import is_dtensor as is_dtensor
from headway.core.weights import _torch
from headway.core.weights._torch import is_traceable_wrapper_subclass
from headway.core.weights.tensor_bytes import TensorSpec

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


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
