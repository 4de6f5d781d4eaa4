"""Compute which parts of a sharded tensor each rank of a layout holds, without asking the ranks."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch

from headway.core.config.mesh import Layout
from headway.core.weights.pieces import compute_ranges, is_dtensor, list_cuts
from headway.layouts.whole_updates.transfers import Box
from headway.planning.dry_run.meter import SHARED


def list_coordinates(layout: Layout) -> list[dict[str, int]]:
    """Return each rank's coordinates along the mesh axes of a layout: one dict per rank, with the names of axes as keys.

    The result includes the joint axes in `SHARED`, along which FSDP shards in layouts with `cp` or `ep`.
    """
    all_coordinates = []
    for rank in range(layout.num_ranks):
        coordinates = layout.find_coordinates(rank)
        for inner_axes, joint_axis in SHARED.items():
            coordinates[joint_axis] = coordinates["shard"]
            for axis in inner_axes:
                coordinates[joint_axis] = coordinates[joint_axis] * getattr(layout, axis) + coordinates[axis]
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
        self._known: dict[Any, list[list[Box]]] = {}

    def list_boxes(self, tensor: torch.Tensor) -> list[list[Box]]:
        """Return one list of boxes per rank: the parts of a tensor that the rank holds.

        A box is a pair of (first index, length), each a tuple with one number per dim. A plain tensor is one box on
        every rank.
        """
        if not is_dtensor(tensor):
            whole: Box = (0,) * tensor.ndim, tuple(tensor.shape)
            return [[whole]] * self._layout.num_ranks
        self._coordinates = self._coordinates or list_coordinates(self._layout)
        mesh: Any = tensor.device_mesh
        key = mesh.mesh_dim_names, tuple(tensor.shape), str(tensor.placements)
        if key not in self._known:
            cuts = list_cuts(tensor)
            ranges = [
                compute_ranges(length, [(factor, mesh.size(axis)) for axis, factor in each])
                for length, each in zip(tensor.shape, cuts)
            ]
            by_place: dict[Any, list[Box]] = {}  # ranks with equal coordinates along the sharding axes share one list
            boxes_by_rank = []
            for coordinates in self._coordinates:
                place = tuple(tuple(coordinates[mesh.mesh_dim_names[axis]] for axis, _ in each) for each in cuts)
                if place not in by_place:
                    by_place[place] = _combine_ranges([state[at] for state, at in zip(ranges, place)])
                boxes_by_rank.append(by_place[place])
            self._known[key] = boxes_by_rank
        return self._known[key]


def _combine_ranges(along: Sequence[Sequence[tuple[int, int]]]) -> list[Box]:
    """Return the boxes that have one of the index ranges along each dim of a tensor."""
    return [
        (tuple(start for start, _ in runs), tuple(stop - start for start, stop in runs)) for runs in product(*along)
    ]
