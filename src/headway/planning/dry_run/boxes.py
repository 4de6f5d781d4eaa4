"""Compute which parts of a sharded tensor each rank of a layout holds, without asking the ranks."""

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from headway.core.config.mesh import Layout
from headway.core.weights.dtensor_boxes import compute_ranges, list_cuts
from headway.core.weights.pieces import is_dtensor
from headway.layouts.whole_updates.transfers import Box
from headway.planning.dry_run.joint_axes import JOINT_AXES, join_coordinates

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def list_coordinates(layout: Layout) -> list[dict[str, int]]:
    """Return each rank's coordinates along the mesh axes of a layout: one dict per rank, with the names of axes as keys.

    The result includes the joint axes in `JOINT_AXES`, along which FSDP shards in layouts with `cp` or `ep`.
    """
    all_coordinates = []
    for rank in range(layout.num_ranks):
        coordinates = layout.find_coordinates(rank)
        for inner_axes, joint_axis in JOINT_AXES.items():
            coordinates[joint_axis] = join_coordinates(coordinates, inner_axes, layout)
        all_coordinates.append(coordinates)
    return all_coordinates


class RankBoxes:
    """Boxes (rectangular parts) of tensors on each rank of a layout.

    Args:
        layout: Layout of the run.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._coordinates: list[dict[str, int]] = []
        self._known: dict[Any, list[list[Box]]] = {}  # results, by the mesh, shape and placements of the tensor

    def list_boxes(self, tensor: torch.Tensor) -> list[list[Box]]:
        """Return one list of boxes per rank: the rectangular parts of a tensor that the rank holds.

        A plain tensor is one box on every rank.
        """
        if not is_dtensor(tensor):
            full_box = Box((0,) * tensor.ndim, tuple(tensor.shape))
            return [[full_box]] * self._layout.num_ranks
        self._coordinates = self._coordinates or list_coordinates(self._layout)
        mesh: Any = tensor.device_mesh
        key = mesh.mesh_dim_names, tuple(tensor.shape), str(tensor.placements)
        if key not in self._known:
            self._known[key] = self._compute_boxes(tensor)
        return self._known[key]

    def _compute_boxes(self, tensor: "DTensor") -> list[list[Box]]:
        """Return one list of boxes per rank for a DTensor. Ranks that hold the same part of it share one list."""
        mesh: Any = tensor.device_mesh
        cuts_by_dim = list_cuts(tensor)
        # For each dim of the tensor: index ranges by the coordinates along the mesh axes that shard the dim.
        ranges_by_dim = [
            compute_ranges(length, [(factor, mesh.size(axis)) for axis, factor in cuts])
            for length, cuts in zip(tensor.shape, cuts_by_dim)
        ]
        boxes_by_position: dict[Any, list[Box]] = {}
        boxes_by_rank = []
        for coordinates in self._coordinates:
            # For each dim of the tensor: this rank's coordinates along the mesh axes that shard the dim.
            position = tuple(tuple(coordinates[mesh.mesh_dim_names[axis]] for axis, _ in cuts) for cuts in cuts_by_dim)
            if position not in boxes_by_position:
                own_ranges = [ranges[coordinate] for ranges, coordinate in zip(ranges_by_dim, position)]
                boxes_by_position[position] = _combine_ranges(own_ranges)
            boxes_by_rank.append(boxes_by_position[position])
        return boxes_by_rank


def _combine_ranges(ranges_by_dim: Sequence[Sequence[tuple[int, int]]]) -> list[Box]:
    """Return the boxes that have one of the index ranges, pairs of (start, stop), along each dim of a tensor."""
    return [
        Box(tuple(start for start, _ in ranges), tuple(stop - start for start, stop in ranges))
        for ranges in product(*ranges_by_dim)
    ]
