"""Report the memory of each device in a placement: stored weights, other required memory, and unused memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from headway.common.text import format_bytes, format_columns
from headway.offload.placement.budget import Device
from headway.offload.placement.solver import PlacementSolution
from headway.offload.placement.survey import ModuleTree

_OPTIONAL = ("cache", "activations", "streaming")
"""Titles of the columns that the table leaves out if they are empty."""


@dataclass
class DeviceUse:
    """Memory of one device in a placement, in bytes.

    Attributes:
        device: Index or name of the device.
        budget: Available memory, or None for no limit.
        weights: Weights and buffers stored on the device.
        cache: Memory that stays in use after a forward, such as the KV caches of the declared workload.
        activations: Peak of the memory that is in use only during a forward.
        streaming: Memory for the largest offloaded layer, or 0 if offloaded layers run on another device.
        units: Names of the indivisible modules and tensors stored on the device.
    """

    device: Device
    budget: int | None
    weights: int = 0
    cache: int = 0
    activations: int = 0
    streaming: int = 0
    units: list[str] = field(default_factory=list)

    @property
    def used(self) -> int:
        """Bytes of all memory that is in use at the peak of a forward."""
        return self.weights + self.cache + self.activations + self.streaming

    @property
    def headroom(self) -> int | None:
        """Unused bytes of the budget, or None if there is no limit."""
        return None if self.budget is None else self.budget - self.used


@dataclass(frozen=True)
class PlacementReport:
    """Memory of all devices in a placement.

    Attributes:
        rows: Memory of each device, in the order in which devices are filled.
        main_device: Device that runs offloaded layers.
    """

    rows: list[DeviceUse]
    main_device: Device

    def row(self, device: Device) -> DeviceUse:
        """Return the entry with the memory of one device.

        Raises:
            KeyError: If the device is not part of the placement.
        """
        for row in self.rows:
            if row.device == device:
                return row
        raise KeyError(device)

    def headroom(self, device: Device) -> int | None:
        """Return the bytes of a device's budget that are unused at the peak, or None if there is no limit.

        Raises:
            KeyError: If the device is not part of the placement.
        """
        return self.row(device).headroom

    def table(self) -> str:
        """Return the report as text: one line per device, and then the first and last module on each device.

        Devices that have neither a budget nor any part of the model are left out.
        """
        devices = [_format_cells(row) for row in self.rows if row.units or row.budget]
        titles = ["device", "units", "weights", "cache", "activations", "streaming", "budget", "headroom"]
        # Columns that are empty for all devices are left out.
        shown = [title for title in titles if title not in _OPTIONAL or any(cells[title] != "-" for cells in devices)]
        lines = format_columns([shown, *([cells[title] for title in shown] for cells in devices)], ">")
        spans = [f"{row.device}: {_format_span(row.units)}" for row in self.rows if row.units]
        return "\n".join([*lines, *spans])


def make_report(
    tree: ModuleTree,
    solution: PlacementSolution,
    devices: list[Device],
    num_compute: int,
    budgets: Mapping[Device, int],
) -> PlacementReport:
    """Return the memory that a placement needs on each device.

    Args:
        tree: Parts of the model.
        solution: Placement of the parts.
        devices: All devices: first those that compute, then those that only store weights.
        num_compute: Number of devices that compute.
        budgets: Available bytes of each device.
    """
    rows = [DeviceUse(device, budgets.get(device)) for device in devices]
    main = rows[solution.main]
    for part, units, device_index in zip(tree.parts, tree.part_units, solution.part_devices):
        row = rows[device_index]
        row.units += [tree.unit_names[unit] for unit in units]
        if device_index < num_compute:
            row.weights += part.size
            row.cache += part.cache
            row.activations = max(row.activations, part.activations)
        else:  # the part is offloaded, and runs on the main device
            row.weights += part.size - part.buffers
            main.weights += part.buffers
            main.cache += part.cache
            main.activations = max(main.activations, part.activations)
            main.streaming = max(main.streaming, part.size - part.buffers)
    return PlacementReport(rows, main.device)


def _format_cells(row: DeviceUse) -> dict[str, str]:
    """Return the cells of a device's row in the table, by the title of the column."""

    def format_size(value: int | None, absent: str) -> str:
        return format_bytes(value) if value else absent

    return {
        "device": str(row.device),
        "units": str(len(row.units)),
        "weights": format_bytes(row.weights),
        "cache": format_size(row.cache, "-"),
        "activations": format_size(row.activations, "-"),
        "streaming": format_size(row.streaming, "-"),
        "budget": format_size(row.budget, "no limit" if row.budget is None else "0 B"),
        "headroom": "no limit" if row.headroom is None else format_bytes(row.headroom),
    }


def _format_span(units: list[str]) -> str:
    """Return the names of the first and the last unit."""
    first, last = units[0] or "the full model", units[-1]
    return first if len(units) == 1 else f"{first} ... {last}"
