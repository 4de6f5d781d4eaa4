"""What each rank of a run holds of a model, from how one rank's tensors were cut: arithmetic on placements, for all ranks at once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from headway.config.mesh import Layout
from headway.strategies.fully_sharded.dtensors import local

_BOTH = "shard_cp"
"""The mesh's name for shards and the parts of a sequence together: ranks along cp share parameters, too."""
_SHARDED = frozenset({"shard", "cp", _BOTH})
"""Axes along which fully_shard pads: every rank of them keeps as many elements as the first."""


@dataclass(frozen=True)
class TensorShare:
    """A tensor of the model, whole, and how it is cut.

    Attributes:
        name: in the bare model.
        shape: of the whole tensor.
        itemsize: bytes of an element.
        learns: has it a gradient?
        cuts: {dimension: the axes that cut it, the first cut first}.
        stages: places along "pp" that hold it; None: all.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    learns: bool
    cuts: dict[int, tuple[str, ...]]
    stages: frozenset[int] | None = None

    @property
    def axes(self) -> set[str]:
        """All axes that cut it."""
        found = {axis for axes in self.cuts.values() for axis in axes}
        return found - {_BOTH} | {"shard", "cp"} if _BOTH in found else found


def pieces(named: Iterable[tuple[str, torch.Tensor]]) -> list[TensorShare]:
    """The cut of each tensor, sharded or not."""
    return [
        TensorShare(name, tuple(tensor.shape), tensor.element_size(), tensor.requires_grad, _cuts(tensor))
        for name, tensor in named
    ]


def _cuts(tensor: torch.Tensor) -> dict[int, tuple[str, ...]]:
    if not isinstance(tensor, DTensor):
        return {}
    names: Sequence[str] = tensor.device_mesh.mesh_dim_names or ()
    found: dict[int, list[str]] = {}
    is_strided = any(
        not isinstance(placement, Shard) and hasattr(placement, "split_factor") for placement in tensor.placements
    )
    placed: list[tuple[str, Placement]] = list(zip(names, tensor.placements))
    # fully_shard cuts what tensor parallelism has cut before it, and marks that by a stride.
    for name, placement in reversed(placed) if is_strided else placed:
        if placement.is_shard() or hasattr(placement, "split_factor"):
            found.setdefault(placement.dim, []).append(name)  # type: ignore[attr-defined]
    return {dim: tuple(axes) for dim, axes in found.items()}


class RankGroups:
    """All ranks of a layout, by number."""

    def __init__(self, layout: Layout) -> None:
        self.num_ranks = layout.num_ranks
        self.sizes = layout.sizes
        stride, ranks = self.num_ranks, torch.arange(self.num_ranks)
        self.coordinates = {"pp": torch.zeros_like(ranks)}
        for axis, size in self.sizes.items():
            stride //= size
            self.coordinates[axis] = ranks // stride % size
        self._cuts = dict(self.sizes)
        if {"shard", "cp"} <= self.sizes.keys():
            self._cuts[_BOTH] = layout.num_shards
            self.coordinates[_BOTH] = self.coordinates["shard"] * layout.cp + self.coordinates["cp"]

    def elements(self, piece: TensorShare) -> tuple[torch.Tensor, torch.Tensor]:
        """How many elements of it each rank holds, and for how many it has memory: (num_ranks,) each."""
        held = stored = torch.ones(self.num_ranks, dtype=torch.long)
        for dim, size in enumerate(piece.shape):
            length = room = torch.full((self.num_ranks,), size)
            for axis in piece.cuts.get(dim, ()):
                if axis not in self._cuts:
                    continue
                chunk = -(-length // self._cuts[axis])
                length = (length - chunk * self.coordinates[axis]).clamp(min=0).minimum(chunk)
                room = chunk if axis in _SHARDED else length
            held, stored = held * length, stored * room
        if piece.stages is not None:
            is_here = self.is_on(piece.stages)
            held, stored = held * is_here, stored * is_here
        return held, stored

    def by_stage(self, values: Sequence[int]) -> torch.Tensor:
        """What each rank has, of what each place along "pp" has: (num_ranks,)."""
        return torch.tensor(values, dtype=torch.long)[self.coordinates["pp"]]

    def is_on(self, stages: frozenset[int]) -> torch.Tensor:
        """Which ranks stand at these places along "pp": (num_ranks,)."""
        return torch.isin(self.coordinates["pp"], torch.tensor(sorted(stages)))


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of memory behind these tensors here, each storage once; padding counts."""
    found = {storage._cdata: storage.nbytes() for storage in (local(tensor).untyped_storage() for tensor in tensors)}
    return sum(found.values())
