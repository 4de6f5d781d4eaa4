"""Rates of the machines of a run, and the bandwidth along each axis of a layout that follows from them."""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from headway.core.config.mesh import Layout
from headway.errors import ConfigError


@dataclass(frozen=True)
class ClusterRates:
    """Bandwidths, computing rate and memory of the machines of a run.

    Attributes:
        machine_ranks: Ranks per machine.
        intra: Bandwidth in bytes per second at which a rank sends within its machine.
        inter: Bandwidth in bytes per second at which a rank sends to other machines through its own network card.
        flops: Floating point operations per second of each rank, as reached in practice, not the advertised peak.
        memory: Bytes of memory per rank, or None for no limit.

    Raises:
        ConfigError: If any value but `memory` is not above 0.
    """

    machine_ranks: int = 8
    intra: float = 300e9
    inter: float = 40e9
    flops: float = 400e12
    memory: int | None = None

    def __post_init__(self) -> None:
        if self.machine_ranks < 1 or min(self.intra, self.inter, self.flops) <= 0:
            raise ConfigError(
                f"a cluster of machine_ranks={self.machine_ranks}, intra={self.intra:g}, inter={self.inter:g} and "
                f"flops={self.flops:g}; all of them must be above 0"
            )

    def is_within_machine(self, axis: str, layout: Layout) -> bool:
        """Whether every process group along an axis is within a single machine.

        Args:
            axis: Name of an axis, or several names joined by "x" or "_". If the layout has none of them, all axes.
            layout: Layout of the run.
        """
        axis_strides = _list_strides(axis, layout)
        # Difference between the highest and the lowest rank of a group.
        span = sum((each.size - 1) * each.stride for each in axis_strides)
        if span >= self.machine_ranks:
            return False
        # A group is within a block of this many consecutive ranks. Blocks must not cross the border of a machine.
        block = max((each.size * each.stride for each in axis_strides), default=1)
        return self.machine_ranks % block == 0 or layout.num_ranks <= self.machine_ranks

    def get_rate(self, axis: str, layout: Layout) -> float:
        """Return the bandwidth in bytes per second at which a rank sends along an axis of a layout.

        Within a group, NCCL sends through the network cards of all of the group's ranks on a machine. So if eight
        neighboring ranks are in one group, each can send eight times as much as with one card. The result is at most
        the bandwidth of the links within the machine. A rank whose peers are all on other machines has only its own
        card.

        Args:
            axis: Name of an axis, or several names joined by "x" or "_". If the layout has none of them, all axes.
            layout: Layout of the run.
        """
        if self.is_within_machine(axis, layout):
            return self.intra
        # Number of a group's ranks on one machine.
        group_ranks = prod(
            max(1, min(each.size, self.machine_ranks // each.stride)) for each in _list_strides(axis, layout)
        )
        return self.inter if group_ranks == 1 else min(self.intra, self.inter * group_ranks)


class _AxisStride(NamedTuple):
    """Position of an axis in the order of ranks.

    Attributes:
        size: Number of ranks along the axis.
        stride: Difference between the numbers of two ranks that are neighbors along the axis.
    """

    size: int
    stride: int


def _list_strides(axis: str, layout: Layout) -> list[_AxisStride]:
    """Return the size and stride of each axis in a name that joins several, such as "shardxtp" or "shard_cp".

    If the layout has none of the named axes, those of all axes of the layout are returned.
    """
    names = set(axis.replace("_", "x").split("x")) & layout.sizes.keys()
    if not names:
        names = set(layout.sizes)
    strides: list[_AxisStride] = []
    stride = layout.num_ranks
    for name, size in layout.sizes.items():
        stride //= size
        if name in names:
            strides.append(_AxisStride(size, stride))
    return strides
