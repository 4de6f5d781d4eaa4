"""Derive from a device map the home of each tensor: the device or file where it is stored between forwards.

Loading a model and running it both use homes that are derived by this code.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from headway.core.runtime.device import detect_hardware
from headway.core.weights.names import TensorLocation, map_locations, map_ties
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
"""Home of tensors that stay in files on disk."""
Home = torch.device | str
"""Place where a tensor is stored between forwards: a torch device, or `DISK`."""


@dataclass(frozen=True)
class Placement:
    """Device map applied to one model: where each tensor is stored, and where it is used.

    Attributes:
        device_map: Map that covers the model. All of its devices are on this machine.
        main: Device that runs offloaded parts.
        homes: Device (or "disk") on which each tensor is stored between forwards, by name.
    """

    device_map: DeviceMap
    main: torch.device
    homes: dict[str, Home]

    def list_devices(self) -> set[torch.device]:
        """Return the accelerators that this placement uses. The CPU is not included."""
        homes = {get_home(device) for device in self.device_map.values()} | {self.main}
        return {home for home in homes if isinstance(home, torch.device)} - {CPU}

    def get_run_device(self, name: str) -> torch.device:
        """Return the device on which a module or tensor with this name is used.

        Offloaded parts are used on the main device.
        """
        home = get_home(get_device(self.device_map, name))
        return home if isinstance(home, torch.device) and home != CPU else self.main


def make_placement(
    model: nn.Module, device_map: DeviceMap, main: Device | torch.device | None = None, offload_buffers: bool = False
) -> Placement:
    """Apply a device map to a model, and return where each tensor is stored and used.

    Args:
        model: Model to place. Every tensor must have an entry in the map.
        device_map: Map as returned by resolve_device_map().
        main: Device that runs offloaded parts. None: the first accelerator in the map, or else the CPU.
        offload_buffers: Whether buffers of offloaded parts are offloaded with them. If False, they stay on `main`,
            because they are small.

    Raises:
        DeviceMapError: If this machine does not have `main`.
    """
    main_device = resolve_compute_device(device_map.main_device if main is None else main, "main_device")
    places = map_locations(model)
    homes: dict[str, Home] = {}
    for name, place in places.items():
        home = get_home(get_device(device_map, name))
        is_small_buffer = not place.is_parameter and not offload_buffers
        homes[name] = main_device if is_offloaded(home) and is_small_buffer else home
    return Placement(device_map, main_device, _join_tied(places, homes, main_device))


def _join_tied(places: Mapping[str, TensorLocation], homes: dict[str, Home], main: torch.device) -> dict[str, Home]:
    """Return the homes, with offloaded tensors moved to the accelerator of a tensor to which they are tied.

    A home is the device, or "disk", where a tensor is stored between forwards. A tensor is moved only if that
    accelerator is the main device or the home of the first tensor of the tied group.

    Args:
        places: Modules and attributes that hold each tensor, by name.
        homes: Home of each tensor, by name.
        main: Device that runs offloaded parts.
    """
    joined = dict(homes)
    for name, group in map_ties(places).items():
        leader_home = joined[group[0]]
        on_accelerators = [joined[other] for other in group if not is_offloaded(joined[other])]
        home = on_accelerators[0] if on_accelerators else leader_home
        if is_offloaded(joined[name]) and home in (main, leader_home):
            joined[name] = home
    return joined


def is_offloaded(home: Home) -> bool:
    """Whether a home is main memory or "disk". A home is the place where a tensor is stored between forwards.

    A tensor with such a home is offloaded: it can be used on another device.
    """
    return home in (DISK, CPU)


def get_home(device: Device) -> Home:
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
    device = parse_device(requested)
    home = get_home(device)
    if not isinstance(home, torch.device) or find_absent_devices([device]):
        raise DeviceMapError(
            f"{argument}={requested!r} cannot run the model: this machine has {describe_devices()}; give 'cpu', or None"
        )
    return home
