"""Homes: where each tensor of a model stays by its device map, settled once for loading it and for running it."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from headway.errors import DeviceMapError
from headway.offload.placement.budget import Device, absent_from_here, as_device, devices_here
from headway.offload.placement.device_map import DeviceMap, device_of
from headway.runtime.device import detect
from headway.weights.names import TensorLocation, places_of, tied_groups

CPU = torch.device("cpu")
DISK = "disk"
Home = torch.device | str
"""A device as torch names it, or DISK."""


@dataclass(frozen=True)
class Placement:
    """A device map settled for one model.

    Attributes:
        device_map: it covers the model, and its devices are here.
        main: where offloaded parts run.
        homes: where each tensor stays, by name.
    """

    device_map: DeviceMap
    main: torch.device
    homes: dict[str, Home]

    def devices(self) -> set[torch.device]:
        """The devices that compute, but for the CPU."""
        found = {home_of(device) for device in self.device_map.values()} | {self.main}
        return {device for device in found if isinstance(device, torch.device)} - {CPU}

    def runs_on(self, name: str) -> torch.device:
        """Where a module or tensor of the map is used."""
        home = home_of(device_of(self.device_map, name))
        return home if isinstance(home, torch.device) and home != CPU else self.main


def settle(
    model: nn.Module, device_map: DeviceMap, main: Device | torch.device | None = None, offload_buffers: bool = False
) -> Placement:
    """Settle a map that covers the model.

    Args:
        device_map: as resolve_device_map() gives it.
        main: where offloaded parts run; None: the first accelerator in the map, else the CPU.
        offload_buffers: buffers of offloaded parts stay with them; otherwise they are small, and stay on `main`.

    Raises:
        DeviceMapError: this machine does not have `main`.
    """
    chosen = compute_device(device_map.main_device if main is None else main, "main_device")
    places = places_of(model)
    homes: dict[str, Home] = {}
    for name, place in places.items():
        home = home_of(device_of(device_map, name))
        stays = not is_offloaded(home) or place.is_parameter or offload_buffers
        homes[name] = home if stays else chosen
    return Placement(device_map, chosen, _joined(places, homes, chosen))


def _joined(places: Mapping[str, TensorLocation], homes: dict[str, Home], main: torch.device) -> dict[str, Home]:
    """A tensor with several names stays where its first name on an accelerator says."""
    found = dict(homes)
    for name, group in tied_groups(places).items():
        leader = found[group[0]]
        first = next((found[other] for other in group if not is_offloaded(found[other])), leader)
        if is_offloaded(found[name]) and first in (main, leader):
            found[name] = first
    return found


def is_offloaded(home: Home) -> bool:
    """Is it a place where weights only lie: host memory or the disk?"""
    return home in (DISK, CPU)


def home_of(device: Device) -> Home:
    """An entry of a device map as torch names it; "disk" stays."""
    if isinstance(device, int):
        return torch.device(detect().kind, device)
    return DISK if device == DISK else torch.device(device)


def compute_device(given: Device | torch.device, argument: str) -> torch.device:
    """A device that this machine has and that computes.

    Raises:
        DeviceMapError: it has none of the kind, or fewer.
    """
    device = as_device(given)
    found = home_of(device)
    if not isinstance(found, torch.device) or absent_from_here([device]):
        raise DeviceMapError(
            f"{argument}={given!r} cannot compute here: this machine has {devices_here()}; give 'cpu', or None"
        )
    return found
