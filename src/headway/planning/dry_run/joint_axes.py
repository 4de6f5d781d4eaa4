"""Joint axes of a layout, along which FSDP shards parameters over the ranks of several axes."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

from headway.core.config.mesh import Layout

Coordinates = TypeVar("Coordinates", int, torch.Tensor)
"""Coordinate of one rank, or a tensor of shape (num_ranks,) with the coordinates of all ranks."""

JOINT_AXES = {("cp",): "shard_cp", ("ep",): "shard_ep", ("cp", "ep"): "shard_cp_ep"}
"""Names of the joint axes along which FSDP shards in layouts with "cp" or "ep".

Each key lists the axes that are joined with "shard".
"""


def join_coordinates(coordinates: Mapping[str, Coordinates], inner_axes: Sequence[str], layout: Layout) -> Coordinates:
    """Return coordinates along a joint axis. "shard" is its outermost axis, and the last inner axis varies fastest.

    Args:
        coordinates: Coordinates along "shard" and the inner axes, by name of the axis.
        inner_axes: Axes that are joined with "shard": a key of `JOINT_AXES`.
        layout: Layout with the sizes of the axes.
    """
    joined = coordinates["shard"]
    for axis in inner_axes:
        joined = joined * int(getattr(layout, axis)) + coordinates[axis]
    return joined
