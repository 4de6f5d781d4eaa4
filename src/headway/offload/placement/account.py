"""The account of a placement: what lies on each device, what else it needs there, and what is left."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from headway.common.text import columns, format_bytes
from headway.offload.placement.budget import Device
from headway.offload.placement.solver import Solution
from headway.offload.placement.survey import ModuleTree


@dataclass
class DeviceUse:
    """One device's part, in bytes.

    Attributes:
        device: which one.
        budget: what may be used of it; None where there is no limit.
        weights: what lies there for good: weights and buffers.
        kept: what running leaves there (KV caches of the declared workload).
        passing: the peak of what running needs there for a moment.
        streamed: room for the largest offloaded layer, which runs there.
        units: names of the units that lie there.
    """

    device: Device
    budget: int | None
    weights: int = 0
    kept: int = 0
    passing: int = 0
    streamed: int = 0
    units: list[str] = field(default_factory=list)

    @property
    def used(self) -> int:
        """All that is needed there at once."""
        return self.weights + self.kept + self.passing + self.streamed

    @property
    def headroom(self) -> int | None:
        """What is left of the budget; None where there is no limit."""
        return None if self.budget is None else self.budget - self.used


@dataclass(frozen=True)
class PlacementReport:
    """What a placement came to.

    Attributes:
        rows: one for each device, in the order of filling.
        main_device: where offloaded layers run.
    """

    rows: list[DeviceUse]
    main_device: Device

    def row(self, device: Device) -> DeviceUse:
        """The part of one device.

        Raises:
            KeyError: it has none.
        """
        for row in self.rows:
            if row.device == device:
                return row
        raise KeyError(device)

    def headroom(self, device: Device) -> int | None:
        """Bytes left of a device's budget when all runs; None where there is no limit."""
        return self.row(device).headroom

    def table(self) -> str:
        """The account as text, one line a device."""
        titles = ["device", "units", "weights", "cache", "activations", "streaming", "budget", "headroom"]
        lines = [titles, *(_cells(row) for row in self.rows if row.units or row.budget)]
        shown = [i for i in range(len(titles)) if i not in (3, 4, 5) or any(line[i] != "-" for line in lines[1:])]
        rows = columns([[line[i] for i in shown] for line in lines], ">")
        spans = [f"{row.device}: {_span(row.units)}" for row in self.rows if row.units]
        return "\n".join([*rows, *spans])


def account_of(
    surveyed: ModuleTree, solution: Solution, devices: list[Device], num_compute: int, budgets: Mapping[Device, int]
) -> PlacementReport:
    """What a solution comes to on each of the devices, of which the first `num_compute` compute."""
    rows = [DeviceUse(device, budgets.get(device)) for device in devices]
    main = rows[solution.main]
    for part, units, where in zip(surveyed.parts, surveyed.members, solution.device):
        row = rows[where]
        row.units += [surveyed.names[unit] for unit in units]
        if where < num_compute:
            row.weights += part.size
            row.kept += part.kept
            row.passing = max(row.passing, part.passing)
        else:
            row.weights += part.size - part.buffers
            main.weights += part.buffers
            main.kept += part.kept
            main.passing = max(main.passing, part.passing)
            main.streamed = max(main.streamed, part.size - part.buffers)
    return PlacementReport(rows, main.device)


def _cells(row: DeviceUse) -> list[str]:
    def size(value: int | None, absent: str) -> str:
        return format_bytes(value) if value else absent

    headroom = "no limit" if row.headroom is None else format_bytes(row.headroom)
    return [
        str(row.device),
        str(len(row.units)),
        format_bytes(row.weights),
        size(row.kept, "-"),
        size(row.passing, "-"),
        size(row.streamed, "-"),
        size(row.budget, "no limit" if row.budget is None else "0 B"),
        headroom,
    ]


def _span(units: list[str]) -> str:
    first, last = units[0] or "the whole model", units[-1]
    return first if len(units) == 1 else f"{first} ... {last}"
