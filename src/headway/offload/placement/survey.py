"""Divide a model into parts that a placement does not split over devices, and measure their memory."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from headway.offload.placement.sizes import Dtype, TensorSizes, collect_class_names
from headway.offload.placement.solver import ModelPart
from headway.offload.placement.workload import ModuleDemand, Workload, measure_demands

_PARAMETER, _BUFFER, _TRANSIENT = range(3)
"""Kinds of tensors. A transient tensor is a non-persistent buffer, which keeps its dtype when the model is loaded."""


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
        names = [self.unit_names[unit] or "the whole model" for unit in self.part_units[largest]]
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
        no_split_module_classes: Names of classes whose modules are not divided.
        dtype: Dtype in which the model will be loaded, or None for the model's dtype.
        special_dtypes: Dtypes of tensors by name. They take precedence over `dtype`.
        offload_buffers: Whether buffers of offloaded parts are offloaded, too.
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
    first_units: dict[int, int] = {}
    group = list(range(len(units)))
    sizes, buffers = [0] * len(units), [0] * len(units)
    for i, (name, part) in enumerate(units):
        for full, tensor, kind in _iterate_tensors(name, part, model):
            first = first_units.setdefault(id(tensor), i)
            if first != i:
                _join_units(group, first, i)
                continue
            size = measure_size(full, tensor, kind != _TRANSIENT)
            sizes[i] += size
            if kind != _PARAMETER and not offload_buffers:
                buffers[i] += size
    units_by_root: dict[int, list[int]] = {}
    for i in range(len(names)):
        units_by_root.setdefault(_find_root(group, i), []).append(i)
    parts = [
        ModelPart(
            size=sum(sizes[i] for i in own),
            buffers=sum(buffers[i] for i in own),
            cache=sum(demands.get(names[i], ModuleDemand()).cache for i in own),
            activations=max(demands.get(names[i], ModuleDemand()).activations for i in own),
            is_tied=len(own) > 1,
        )
        for own in units_by_root.values()
    ]
    return ModuleTree(names, list(units_by_root.values()), parts)


def _find_root(group: list[int], i: int) -> int:
    """Return the first of the units that are tied to unit `i`. This first unit represents their group.

    A unit is an indivisible module or a tensor. The search uses union-find with path halving.

    Args:
        group: For each unit, the index of an earlier unit of its group, or its own index. It is changed in place.
        i: Index of a unit.
    """
    while group[i] != i:
        group[i] = group[group[i]]
        i = group[i]
    return i


def _join_units(group: list[int], one: int, other: int) -> None:
    """Merge the two groups of tied units that contain the given units (indivisible modules or tensors).

    The earlier unit represents the merged group and determines its position.

    Args:
        group: For each unit, the index of an earlier unit of its group, or its own index. It is changed in place.
        one: Index of a unit.
        other: Index of another unit.
    """
    low, high = sorted((_find_root(group, one), _find_root(group, other)))
    group[high] = low


def _list_units(model: nn.Module, undivided_classes: frozenset[str]) -> Iterator[tuple[str, nn.Module | torch.Tensor]]:
    """Yield the indivisible modules and tensors (units) of a model with their names, in order.

    For a module that can be divided, its parameters, children and buffers are yielded instead.

    Args:
        model: Model to divide.
        undivided_classes: Names of the classes whose modules are not divided. The model itself is always divided.
    """
    waiting: list[tuple[str, nn.Module | torch.Tensor]] = [("", model)]
    while waiting:
        name, part = waiting.pop()
        if (
            isinstance(part, torch.Tensor)
            or not any(child is not None for child in part._modules.values())
            or (name and type(part).__name__ in undivided_classes)
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


def _iterate_tensors(
    name: str, part: nn.Module | torch.Tensor, model: nn.Module
) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Yield (full name, tensor, kind) for each tensor of a unit, which is an indivisible module or a tensor.

    The kind is `_PARAMETER`, `_BUFFER`, or `_TRANSIENT` for a non-persistent buffer.

    Args:
        name: Name of the unit in the model.
        part: Module or tensor that is the unit.
        model: Model that contains the unit.
    """
    if isinstance(part, torch.Tensor):
        owner, _, key = name.rpartition(".")
        kind = _PARAMETER
        if not isinstance(part, nn.Parameter):
            kind = _TRANSIENT if key in model.get_submodule(owner)._non_persistent_buffers_set else _BUFFER
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
