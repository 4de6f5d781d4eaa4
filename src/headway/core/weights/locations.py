"""Locations of the tensors in a model: find them by name, and replace the tensor at a location."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class TensorLocation:
    """Location of a tensor in a model: `module._parameters[leaf]` or `module._buffers[leaf]`.

    Attributes:
        module: Module that holds the tensor.
        leaf: Name of the tensor in the module.
        is_parameter: Whether the tensor is a parameter. False: it is a buffer.
        is_persistent: Whether the module's state dict contains the tensor.
    """

    module: nn.Module
    leaf: str
    is_parameter: bool
    is_persistent: bool = True

    @property
    def tensor(self) -> torch.Tensor:
        """Tensor that is currently at this location."""
        tensors: Mapping[str, torch.Tensor | None] = (
            self.module._parameters if self.is_parameter else self.module._buffers
        )
        tensor = tensors[self.leaf]
        assert tensor is not None
        return tensor

    def put_tensor(self, tensor: torch.Tensor) -> None:
        """Replace the tensor at this location, without the checks of `register_parameter` and `register_buffer`."""
        if self.is_parameter:
            self.module._parameters[self.leaf] = tensor  # type: ignore[assignment]
        else:
            self.module._buffers[self.leaf] = tensor
        if isinstance(self.module, nn.RNNBase):
            # RNN kernels read the weights from this separate list.
            self.module._flat_weights = [getattr(self.module, name, None) for name in self.module._flat_weights_names]


def iterate_own_locations(module: nn.Module) -> Iterator[TensorLocation]:
    """Yield the locations of a module's own parameters and buffers, without those of its submodules."""
    for leaf, parameter in module._parameters.items():
        if parameter is not None:
            yield TensorLocation(module, leaf, True)
    for leaf, buffer in module._buffers.items():
        if buffer is not None:
            yield TensorLocation(module, leaf, False, leaf not in module._non_persistent_buffers_set)


def map_locations(model: nn.Module) -> dict[str, TensorLocation]:
    """Return the location of every parameter and buffer of a model, by name.

    A tensor that is tied, or whose module is used twice, has several names.
    """
    modules = model.named_modules(remove_duplicate=False)
    return {
        f"{prefix}.{each.leaf}".lstrip("."): each
        for prefix, module in modules
        for each in iterate_own_locations(module)
    }


def map_ties(locations: Mapping[str, TensorLocation]) -> dict[str, list[str]]:
    """Return a mapping from each tensor name to all names of the same tensor, including that name.

    Args:
        locations: Locations of the tensors, by name.
    """
    groups: defaultdict[int, list[str]] = defaultdict(list)
    for name, location in locations.items():
        groups[id(location.tensor)].append(name)
    return {name: group for group in groups.values() for name in group}


def assign_value(
    locations: Mapping[str, TensorLocation], names: list[str], value: torch.Tensor, is_mapped: bool
) -> None:
    """Set the value of a tensor under all its names.

    If the tensor is on the value's device, its data is replaced. A meta tensor, or one on another device, is replaced
    by a new tensor.

    Args:
        locations: Locations of the model's tensors, by name.
        names: All names of the tensor.
        value: New value. It is not copied.
        is_mapped: Whether the value is in a mapped file.
    """
    first = locations[names[0]]
    old = first.tensor
    new: torch.Tensor
    if old.is_meta or old.device != value.device:
        new = nn.Parameter(value, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else value
    else:
        old.data = value
        new = old
    if is_mapped:
        mark_mapped(new)
    for name in names:
        if locations[name].tensor is not new:
            locations[name].put_tensor(new)


def mark_mapped(tensor: torch.Tensor) -> None:
    """Record that a tensor's values are in a mapped file.

    The record is valid as long as the tensor keeps this memory.
    """
    tensor.headway_mapped_at = tensor.data_ptr()  # type: ignore[attr-defined]


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values are in a mapped file."""
    return bool(getattr(tensor, "headway_mapped_at", None) == tensor.data_ptr()) and tensor.numel() > 0
