"""The survey of a model before it is placed, and the account of a placement: what lies where, and what is left.

The account of a placement: what lies on each device, what else it needs there, and what is left.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from headway.common.text import columns, format_bytes
from headway.offload.placement.budget import Device
from headway.offload.placement.sizes import Dtype, TensorSizes, class_names
from headway.offload.placement.solver import Part, Solution
from headway.offload.placement.workload import Workload, demands


@dataclass(frozen=True)
class ModuleTree:
    """What a placement works on.

    Attributes:
        names: all units in order of registration: modules that are not divided, and tensors of divided ones.
        members: for each part, the indices of its units; more than one where they share tensors.
        parts: the parts in the order of their first units.
    """

    names: list[str]
    members: list[list[int]]
    parts: list[Part]

    def device_map(self, device: list[int]) -> dict[str, int]:
        """{unit's name: device index} in order, from one device index per part."""
        found = [0] * len(self.names)
        for units, where in zip(self.members, device):
            for unit in units:
                found[unit] = where
        return dict(zip(self.names, found))

    def largest(self) -> tuple[str, int]:
        """The name and the bytes of the largest part; tied members are named together."""
        i = max(range(len(self.parts)), key=lambda i: self.parts[i].size)
        return " + ".join(self.names[unit] or "the whole model" for unit in self.members[i]), self.parts[i].size


def survey(
    model: nn.Module,
    no_split_module_classes: Iterable[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    offload_buffers: bool = False,
    workload: Workload | None = None,
) -> ModuleTree:
    """Take the model apart into what a placement may not divide. Linear in the number of modules and tensors."""
    price = TensorSizes(dtype, special_dtypes)
    units = list(_units(model, class_names(no_split_module_classes)))
    names = [name for name, _ in units]
    needs = demands(model, names, workload, dtype) if workload is not None else {}
    # A tensor counts for the first unit that holds it; later holders are tied to that one.
    owner: dict[int, int] = {}
    group = list(range(len(units)))
    sizes, buffers = [0] * len(units), [0] * len(units)
    for i, (name, part) in enumerate(units):
        for full, tensor, kind in _tensors(name, part, model):
            first = owner.setdefault(id(tensor), i)
            if first != i:
                _join(group, first, i)
                continue
            size = price(full, tensor, kind != _TRANSIENT)
            sizes[i] += size
            if kind != _PARAMETER and not offload_buffers:
                buffers[i] += size
    members: dict[int, list[int]] = {}
    for i in range(len(names)):
        members.setdefault(_root(group, i), []).append(i)
    parts = [
        Part(
            size=sum(sizes[i] for i in own),
            buffers=sum(buffers[i] for i in own),
            kept=sum(needs.get(names[i], (0, 0))[0] for i in own),
            passing=max(needs.get(names[i], (0, 0))[1] for i in own),
            is_tied=len(own) > 1,
        )
        for own in members.values()
    ]
    return ModuleTree(names, list(members.values()), parts)


def _root(group: list[int], i: int) -> int:
    while group[i] != i:
        group[i] = group[group[i]]
        i = group[i]
    return i


def _join(group: list[int], one: int, other: int) -> None:
    """The earlier unit leads, so that a group takes the place of its first member."""
    low, high = sorted((_root(group, one), _root(group, other)))
    group[high] = low


def _units(model: nn.Module, whole: frozenset[str]) -> Iterator[tuple[str, nn.Module | torch.Tensor]]:
    """(name, module or tensor) in order: a divided module gives its parameters, its children, its buffers."""
    waiting: list[tuple[str, nn.Module | torch.Tensor]] = [("", model)]
    while waiting:
        name, part = waiting.pop()
        if (
            isinstance(part, torch.Tensor)
            or not any(child is not None for child in part._modules.values())
            or (name and type(part).__name__ in whole)
        ):
            yield name, part
            continue
        dot = f"{name}." if name else ""
        inside: list[tuple[str, nn.Module | torch.Tensor | None]] = [
            *part._parameters.items(),
            *part._modules.items(),
            *part._buffers.items(),
        ]
        waiting.extend((dot + key, value) for key, value in reversed(inside) if value is not None)


_PARAMETER, _BUFFER, _TRANSIENT = range(3)


def _tensors(name: str, part: nn.Module | torch.Tensor, model: nn.Module) -> Iterator[tuple[str, torch.Tensor, int]]:
    """(full name, tensor, what it is) of all that lies in a unit."""
    if isinstance(part, torch.Tensor):
        holder, _, key = name.rpartition(".")
        kind = _PARAMETER
        if not isinstance(part, nn.Parameter):
            kind = _TRANSIENT if key in model.get_submodule(holder)._non_persistent_buffers_set else _BUFFER
        yield name, part, kind
        return
    waiting = [(f"{name}." if name else "", part)]
    while waiting:
        dot, module = waiting.pop()
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield dot + key, parameter, _PARAMETER
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield dot + key, buffer, _TRANSIENT if key in module._non_persistent_buffers_set else _BUFFER
        waiting.extend((f"{dot}{key}.", child) for key, child in module._modules.items() if child is not None)


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
