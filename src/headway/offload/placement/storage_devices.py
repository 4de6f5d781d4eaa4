"""Derive from a device map the storage device of each tensor, where the tensor is stored between forwards.

A storage device is a torch device or "disk". Loading a model and running it both use the storage devices that this code
derives.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from headway.core.runtime.device import detect_hardware
from headway.core.weights.locations import TensorLocation, map_locations, map_ties
from headway.errors import DeviceMapError
from headway.offload.placement.budget import (
    Device,
    describe_devices,
    find_absent_devices,
    parse_device,
)
from headway.offload.placement.device_map import DeviceMap, get_device

CPU = torch.device("cpu")
"""The `torch.device` of main memory."""
DISK = "disk"
"""Storage device of tensors that stay in files on disk."""
StorageDevice = torch.device | str
"""Place where a tensor is stored between forwards: a torch device, or `DISK`."""


@dataclass(frozen=True)
class Placement:
    """Device map applied to one model: where each tensor is stored, and where it is used.

    Attributes:
        device_map: Map that covers the model. All of its devices are on this machine.
        main: Device that runs offloaded parts.
        storage_devices: Device (or "disk") on which each tensor is stored between forwards, by name.
    """

    device_map: DeviceMap
    main: torch.device
    storage_devices: dict[str, StorageDevice]

    def list_devices(self) -> set[torch.device]:
        """Return the accelerators that this placement uses. The CPU is not included."""
        storage_devices = {get_storage_device(device) for device in self.device_map.values()} | {self.main}
        return {device for device in storage_devices if isinstance(device, torch.device)} - {CPU}

    def get_run_device(self, name: str) -> torch.device:
        """Return the device on which a module or tensor with this name is used.

        Offloaded parts are used on the main device.
        """
        device = get_storage_device(get_device(self.device_map, name))
        return device if isinstance(device, torch.device) and device != CPU else self.main


def make_placement(
    model: nn.Module, device_map: DeviceMap, main: Device | torch.device | None = None, offload_buffers: bool = False
) -> Placement:
    """Return where each tensor of a model is to be stored and used under a device map. The model is not changed.

    Args:
        model: Model to place. Every tensor must have an entry in the map.
        device_map: Map as returned by resolve_device_map().
        main: Device that runs offloaded parts. None: the first accelerator in the map, or else the CPU.
        offload_buffers: Whether buffers of offloaded parts are offloaded with them. If False, they stay on `main`,
            because they are small. Default: False.

    Raises:
        DeviceMapError: If a tensor has no entry in the map, or if this machine does not have `main`.
    """
    main_device = resolve_compute_device(device_map.main_device if main is None else main, "main_device")
    places = map_locations(model)
    storage_devices: dict[str, StorageDevice] = {}
    for name, place in places.items():
        device = get_storage_device(get_device(device_map, name))
        stays_on_main = not place.is_parameter and not offload_buffers
        storage_devices[name] = main_device if is_offloaded(device) and stays_on_main else device
    return Placement(device_map, main_device, _join_tied(places, storage_devices, main_device))


def _join_tied(
    places: Mapping[str, TensorLocation], storage_devices: dict[str, StorageDevice], main: torch.device
) -> dict[str, StorageDevice]:
    """Return the storage devices, with offloaded tensors moved to the accelerator of a tensor to which they are tied.

    A tensor is moved only if that accelerator is the main device or the storage device of the first tensor of the tied
    group.

    Args:
        places: Modules and attributes that hold each tensor, by name.
        storage_devices: Storage device of each tensor, by name.
        main: Device that runs offloaded parts.
    """
    joined = dict(storage_devices)
    for name, group in map_ties(places).items():
        leader_device = joined[group[0]]
        on_accelerators = [joined[other] for other in group if not is_offloaded(joined[other])]
        device = on_accelerators[0] if on_accelerators else leader_device
        if is_offloaded(joined[name]) and device in (main, leader_device):
            joined[name] = device
    return joined


def is_offloaded(device: StorageDevice) -> bool:
    """Whether a storage device is main memory or "disk".

    A tensor that is stored there is offloaded: it can be used on another device.
    """
    return device in (DISK, CPU)


def get_storage_device(device: Device) -> StorageDevice:
    """Convert a device in the form of device maps to a `torch.device`, or to "disk"."""
    if isinstance(device, int):
        return torch.device(detect_hardware().kind, device)
    return DISK if device == DISK else torch.device(device)


def resolve_compute_device(requested: Device | torch.device, argument: str) -> torch.device:
    """Convert a device to a `torch.device`, or raise an error if it cannot compute on this machine.

    Args:
        requested: Device that the user gave.
        argument: Name of the argument that the user passed, for messages.

    Raises:
        DeviceMapError: If the machine does not have the device, or the device cannot compute.
    """
    parsed_device = parse_device(requested)
    device = get_storage_device(parsed_device)
    if not isinstance(device, torch.device) or find_absent_devices([parsed_device]):
        raise DeviceMapError(
            f"{argument}={requested!r} cannot run the model: this machine has {describe_devices()}; give 'cpu', or None"
        )
    return device
