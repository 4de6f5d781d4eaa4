"""Describe how a layout shards each parameter, and count the elements that each rank has and allocates."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from headway.core.config.mesh import Layout
from headway.planning.dry_run.joint_axes import JOINT_AXES, join_coordinates

_PADDED_AXES = frozenset({"shard", "cp", *JOINT_AXES.values()})
"""Axes along which `fully_shard` pads tensors, so that every rank allocates as many elements as the first."""


@dataclass(frozen=True)
class TensorSharding:
    """Description of a parameter: its shape, and how it is sharded.

    Attributes:
        name: Name of the parameter in the unwrapped model.
        shape: Shape of the full parameter.
        itemsize: Bytes per element.
        requires_grad: Whether the parameter gets a gradient.
        sharding_axes: Axes of the layout that shard a dimension, in the order of sharding, by index of the dimension.
            Dimensions that are not sharded have no entry.
        stages: Indices of the pipeline stages that have the parameter, or None for all.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    requires_grad: bool
    sharding_axes: dict[int, tuple[str, ...]]
    stages: frozenset[int] | None = None

    @property
    def axes(self) -> set[str]:
        """Names of the layout's axes that shard the parameter along any dimension.

        A joint axis, such as "shard_cp", is replaced by its single axes.
        """
        all_axes = {axis for axes in self.sharding_axes.values() for axis in axes}
        return {single for axis in all_axes for single in axis.split("_")}


def describe_tensors(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> list[TensorSharding]:
    """Return a description of each tensor: its shape, and how it is sharded.

    Args:
        named_tensors: Pairs of a name and a tensor. A tensor that is not a DTensor counts as unsharded.
    """
    return [
        TensorSharding(
            name, tuple(tensor.shape), tensor.element_size(), tensor.requires_grad, _find_sharding_axes(tensor)
        )
        for name, tensor in named_tensors
    ]


def _find_sharding_axes(tensor: torch.Tensor) -> dict[int, tuple[str, ...]]:
    """Return, for each sharded dimension of a tensor, the axes of the layout that shard it, in the order of sharding.

    The dict is empty if the tensor is not a DTensor.
    """
    if not isinstance(tensor, DTensor):
        return {}
    names: Sequence[str] = tensor.device_mesh.mesh_dim_names or ()
    axes_by_dim: dict[int, list[str]] = {}
    is_strided = any(
        not isinstance(placement, Shard) and hasattr(placement, "split_factor") for placement in tensor.placements
    )
    named_placements: list[tuple[str, Placement]] = list(zip(names, tensor.placements))
    # fully_shard splits shards of tensor parallelism further, although its axis comes first in the mesh. A strided
    # placement indicates this order.
    for name, placement in reversed(named_placements) if is_strided else named_placements:
        if placement.is_shard() or hasattr(placement, "split_factor"):
            axes_by_dim.setdefault(placement.dim, []).append(name)  # type: ignore[attr-defined]
    return {dim: tuple(axes) for dim, axes in axes_by_dim.items()}


class RankCoordinates:
    """Coordinates of all ranks along the axes of a layout, used to count the parameters' elements on each rank.

    Args:
        layout: Layout of the run.

    Attributes:
        num_ranks: World size.
        sizes: Sizes of the layout's axes, by name.
        coordinates: Coordinate of every rank along each axis, as tensors of shape (num_ranks,), by axis name.
    """

    def __init__(self, layout: Layout) -> None:
        self.num_ranks = layout.num_ranks
        self.sizes = layout.sizes
        ranks = torch.arange(self.num_ranks)
        # Every layout has these axes, possibly with a single rank.
        self.coordinates = {"pp": torch.zeros_like(ranks), "shard": torch.zeros_like(ranks)}
        stride = self.num_ranks
        for axis, size in self.sizes.items():  # the last axis varies fastest with the rank
            stride //= size
            self.coordinates[axis] = ranks // stride % size
        self._sizes_with_joint = dict(self.sizes)
        for inner_axes, joint_axis in JOINT_AXES.items():
            if all(axis in self.sizes for axis in inner_axes):
                self._sizes_with_joint[joint_axis] = layout.shard * prod(self.sizes[axis] for axis in inner_axes)
                self.coordinates[joint_axis] = join_coordinates(self.coordinates, inner_axes, layout)

    def count_elements(self, parameter: TensorSharding) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the number of a parameter's elements on each rank.

        Args:
            parameter: Description of the parameter and its sharding.

        Returns:
            Two tensors of shape (num_ranks,): the number of elements that each rank has, and the number of elements for
            which the rank allocates memory, including padding.
        """
        # All tensors here have one value per rank. A rank's shard has `length` entries along the current dimension.
        num_elements = num_allocated = torch.ones(self.num_ranks, dtype=torch.long)
        for dim, size in enumerate(parameter.shape):
            length = padded_length = torch.full((self.num_ranks,), size)
            for axis in parameter.sharding_axes.get(dim, ()):
                if axis not in self._sizes_with_joint:
                    continue
                chunk = -(-length // self._sizes_with_joint[axis])  # rounded up, as torch.chunk does
                length = (length - chunk * self.coordinates[axis]).clamp(min=0).minimum(chunk)
                padded_length = chunk if axis in _PADDED_AXES else length
            num_elements, num_allocated = num_elements * length, num_allocated * padded_length
        if parameter.stages is not None:
            has_parameter = self.mask_stages(parameter.stages)
            num_elements, num_allocated = num_elements * has_parameter, num_allocated * has_parameter
        return num_elements, num_allocated

    def expand_by_stage(self, values: Sequence[int]) -> torch.Tensor:
        """Return a tensor of shape (num_ranks,) with the value of each rank's pipeline stage.

        Args:
            values: One value per stage.
        """
        return torch.tensor(values, dtype=torch.long)[self.coordinates["pp"]]

    def mask_stages(self, stages: frozenset[int]) -> torch.Tensor:
        """Return a boolean tensor of shape (num_ranks,) that is True for the ranks of the given pipeline stages."""
        return torch.isin(self.coordinates["pp"], torch.tensor(sorted(stages)))
