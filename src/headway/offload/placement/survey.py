"""Divide a model into parts that a placement does not split over devices, and measure their memory."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from headway.offload.placement.sizes import Dtype, TensorSizes, collect_class_names
from headway.offload.placement.solver import ModelPart
from headway.offload.placement.workload import ModuleDemand, Workload, measure_demands


class _UnitTensor(NamedTuple):
    """Tensor of a unit, which is an indivisible module or a tensor.

    Attributes:
        name: Full name in the model.
        tensor: Tensor.
        is_buffer: Whether it is a buffer, not a parameter.
        is_persistent: Whether `state_dict` contains it. A tensor that is not keeps its dtype when the model is loaded.
    """

    name: str
    tensor: torch.Tensor
    is_buffer: bool
    is_persistent: bool


@dataclass(frozen=True)
class ModuleTree:
    """Model divided into parts, each of which a placement puts on a single device.

    Attributes:
        unit_names: Names of the units in order of registration. A unit is an indivisible module, or a tensor that a
            divided module owns directly.
        part_units: Indices of the units of each part. Units that share tensors form one part.
        parts: Parts in the order of their first units.
    """

    unit_names: list[str]
    part_units: list[list[int]]
    parts: list[ModelPart]

    def make_device_map(self, part_devices: list[int]) -> dict[str, int]:
        """Return the device index of each unit (indivisible module or tensor), by name in order of registration.

        Args:
            part_devices: Device index of each part.
        """
        unit_devices = [0] * len(self.unit_names)
        for units, device in zip(self.part_units, part_devices):
            for unit in units:
                unit_devices[unit] = device
        return dict(zip(self.unit_names, unit_devices))

    def find_largest(self) -> tuple[str, int]:
        """Return the name and the bytes of the largest part.

        If the part consists of several modules or tensors that are tied, the name lists all of them.
        """
        largest = max(range(len(self.parts)), key=lambda index: self.parts[index].size)
        names = [self.unit_names[unit] or "the full model" for unit in self.part_units[largest]]
        return " + ".join(names), self.parts[largest].size


def survey_model(
    model: nn.Module,
    no_split_module_classes: Iterable[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    offload_buffers: bool = False,
    workload: Workload | None = None,
) -> ModuleTree:
    """Divide a model into parts that a placement does not split over devices, and measure their memory.

    This takes time linear in the number of modules and tensors.

    Args:
        model: Model on any device, including the meta device.
        no_split_module_classes: Names of classes whose modules are not divided. None (the default): no such classes.
        dtype: Dtype in which the model will be loaded, or None for the model's dtype.
        special_dtypes: Dtypes of tensors by name. They take precedence over `dtype`.
            None (the default): no such tensors.
        offload_buffers: Whether buffers of offloaded parts are offloaded, too. Default: False.
        workload: Workload whose memory is measured, or None to count only weights.

    Raises:
        DeviceMapError: If the workload cannot be measured.
        ConfigError: If `dtype` or one of `special_dtypes` is not a dtype.
    """
    measure_size = TensorSizes(dtype, special_dtypes)
    units = list(_list_units(model, collect_class_names(no_split_module_classes)))
    names = [name for name, _ in units]
    demands = measure_demands(model, names, workload, dtype) if workload is not None else {}
    # A tensor counts for the first unit that contains it. Later units that contain the tensor are tied to that unit.
    first_units: dict[int, int] = {}  # index of a unit, by `id` of the tensor
    ties = _TieGroups(len(units))
    sizes, buffers = [0] * len(units), [0] * len(units)
    for i, (name, unit) in enumerate(units):
        for each in _iterate_tensors(name, unit, model):
            first_unit = first_units.setdefault(id(each.tensor), i)
            if first_unit != i:
                ties.join_units(first_unit, i)
                continue
            size = measure_size(each.name, each.tensor, each.is_persistent)
            sizes[i] += size
            if each.is_buffer and not offload_buffers:
                buffers[i] += size
    tied_groups = ties.list_groups()
    parts = []
    for tied_units in tied_groups:
        tied_demands = [demands.get(names[i], ModuleDemand()) for i in tied_units]
        part = ModelPart(
            size=sum(sizes[i] for i in tied_units),
            buffers=sum(buffers[i] for i in tied_units),
            cache=sum(demand.cache for demand in tied_demands),
            activations=max(demand.activations for demand in tied_demands),
            is_tied=len(tied_units) > 1,
        )
        parts.append(part)
    return ModuleTree(names, tied_groups, parts)


class _TieGroups:
    """Groups of units that are tied, directly or through other units (union-find with path halving).

    A unit is an indivisible module or a tensor. The first unit of a group represents the group.

    Args:
        num_units: Number of units. At first, each one is a group of its own.
    """

    def __init__(self, num_units: int) -> None:
        # For each unit, the index of an earlier unit of its group, or its own index if it represents the group.
        self._earlier = list(range(num_units))

    def join_units(self, one: int, other: int) -> None:
        """Merge the groups of two units, which are given by their indices."""
        low, high = sorted((self._find_first(one), self._find_first(other)))
        self._earlier[high] = low

    def list_groups(self) -> list[list[int]]:
        """Return the indices of the units of each group. Groups are in the order of their first units."""
        groups: dict[int, list[int]] = {}
        for unit in range(len(self._earlier)):
            groups.setdefault(self._find_first(unit), []).append(unit)
        return list(groups.values())

    def _find_first(self, unit: int) -> int:
        """Return the first unit of a unit's group."""
        earlier = self._earlier
        while earlier[unit] != unit:
            earlier[unit] = earlier[earlier[unit]]  # shortens the path for later calls
            unit = earlier[unit]
        return unit


def _list_units(model: nn.Module, undivided_classes: frozenset[str]) -> Iterator[tuple[str, nn.Module | torch.Tensor]]:
    """Yield the indivisible modules and tensors (units) of a model with their names, in order.

    For a module that can be divided, its parameters, children and buffers are yielded instead.

    Args:
        model: Model to divide.
        undivided_classes: Names of the classes whose modules are not divided. The model itself is always divided.
    """
    stack: list[tuple[str, nn.Module | torch.Tensor]] = [("", model)]
    while stack:
        name, unit = stack.pop()
        if isinstance(unit, torch.Tensor) or not _can_divide(unit, name, undivided_classes):
            yield name, unit
            continue
        prefix = f"{name}." if name else ""
        members: list[tuple[str, nn.Module | torch.Tensor | None]] = [
            *unit._parameters.items(),
            *unit._modules.items(),
            *unit._buffers.items(),
        ]
        # Reversed, because the last one is taken from the stack first.
        stack.extend((prefix + key, member) for key, member in reversed(members) if member is not None)


def _can_divide(module: nn.Module, name: str, undivided_classes: frozenset[str]) -> bool:
    """Whether a module has children, and is the model itself (`name` is empty) or of a class that may be divided."""
    has_children = any(child is not None for child in module._modules.values())
    return has_children and (not name or type(module).__name__ not in undivided_classes)


def _iterate_tensors(name: str, unit: nn.Module | torch.Tensor, model: nn.Module) -> Iterator[_UnitTensor]:
    """Yield the tensors of a unit.

    Args:
        name: Name of the unit in the model.
        unit: Indivisible module, or tensor.
        model: Model that contains the unit.
    """
    if isinstance(unit, torch.Tensor):
        owner_name, _, key = name.rpartition(".")
        is_buffer = not isinstance(unit, nn.Parameter)
        is_persistent = not is_buffer or key not in model.get_submodule(owner_name)._non_persistent_buffers_set
        yield _UnitTensor(name, unit, is_buffer, is_persistent)
        return
    stack = [(f"{name}." if name else "", unit)]
    while stack:
        prefix, module = stack.pop()
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield _UnitTensor(prefix + key, parameter, is_buffer=False, is_persistent=True)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                is_persistent = key not in module._non_persistent_buffers_set
                yield _UnitTensor(prefix + key, buffer, is_buffer=True, is_persistent=is_persistent)
        stack.extend((f"{prefix}{key}.", child) for key, child in module._modules.items() if child is not None)
