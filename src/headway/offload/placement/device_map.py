"""Device maps, which place the parts of a model on devices: lookup, checks and merging of entries."""

import difflib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import nn

from headway.common.text import join_names
from headway.errors import DeviceMapError
from headway.log import get_logger
from headway.offload.placement.budget import (
    Device,
    describe_devices,
    find_absent_devices,
    is_accelerator,
    parse_device,
)
from headway.offload.placement.report import PlacementReport
from headway.offload.placement.sizes import find_tied_parameters

logger = get_logger(__name__)

_SHOWN_FAULTS = 20
"""Maximum number of faults that an error message lists."""


class DeviceMap(dict[str, Device]):
    """Dict from names of modules or tensors to devices, with a report on the memory of each device.

    Args:
        entries: Devices by name. The name "" is the whole model. Default: no entries.
        plan: Budget and used memory of each device, or None if unknown.

    Attributes:
        plan: Budget and used memory of each device, or None for a map written by hand.
    """

    def __init__(
        self, entries: Mapping[str, Device] | Iterable[tuple[str, Device]] = (), plan: PlacementReport | None = None
    ):
        super().__init__(entries)
        self.plan = plan

    @property
    def main_device(self) -> Device:
        """Device that receives inputs and runs offloaded layers: the first accelerator in the map, or else the CPU."""
        return next((device for device in self.values() if is_accelerator(device)), "cpu")

    def explain(self) -> str:
        """Return a table with each device's used bytes, budget and unused bytes, as text.

        For a map without this information, return its entries as lines of text.
        """
        if self.plan is None:
            return "\n".join(f"{name or 'the full model'}: {device}" for name, device in self.items())
        return self.plan.table()


def get_device(device_map: Mapping[str, Device], name: str) -> Device:
    """Return the device of a module or tensor.

    It is taken from the map's most specific entry: the entry for the module or tensor itself, or for the innermost
    module that contains it.

    Args:
        device_map: Device by name of a module or tensor.
        name: Name of the module or tensor.

    Raises:
        DeviceMapError: If the map has no such entry.
    """
    entry = next((prefix for prefix in _list_prefixes(name) if prefix in device_map), None)
    if entry is None:
        raise DeviceMapError(
            f"{name!r} has no place in the device map; its entries are {join_names([repr(name) for name in device_map], 8)}"
        )
    return device_map[entry]


def check_device_map(model: nn.Module, device_map: Mapping[str, Device | torch.device]) -> None:
    """Raise an error unless a device map matches a model.

    The map must cover every tensor, its names must exist in the model, and its devices must be valid. If it places one
    tied parameter on several devices, a warning is logged. Whether this machine has the devices is not checked here.

    Args:
        model: Model on any device, including the meta device.
        device_map: Device by name of a module or tensor. The name "" is the whole model.

    Raises:
        DeviceMapError: If the map has faults. The message lists the first 20 of them.
    """
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    tensors = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    tensors += [name for name, _ in model.named_buffers(remove_duplicate=False)]
    names.update(tensors)
    faults: list[str] = []
    for name, device in device_map.items():
        if name not in names:
            faults.append(_describe_unknown_name(str(name), names))
        try:
            parse_device(device)
        except DeviceMapError as error:
            faults.append(f"{name!r}: {error}")
    missing = [name for name in tensors if not any(prefix in device_map for prefix in _list_prefixes(name))]
    faults += [f"{name!r} has no place" for name in missing]
    if faults:
        raise DeviceMapError(f"the device map does not fit {type(model).__name__}:{_format_faults(faults)}")
    parsed_map = {name: parse_device(device) for name, device in device_map.items()}
    for group in find_tied_parameters(model):
        devices = {get_device(parsed_map, name) for name in group}
        if len(devices) > 1:
            logger.warning(f"{', '.join(group)} are one parameter, placed on {len(devices)} devices: each gets a copy")


def _describe_unknown_name(name: str, known_names: Collection[str]) -> str:
    """Return a message about a name that the model does not have, with the most similar name of the same depth."""
    candidates = [each for each in known_names if each.count(".") == name.count(".")]
    similar = difflib.get_close_matches(name, candidates, n=1)
    suggestion = f"; did you mean {similar[0]!r}?" if similar else ""
    return f"the model has no {name!r}{suggestion}"


def check_presence(device_map: Mapping[str, Device]) -> None:
    """Raise DeviceMapError if the map uses devices that this machine does not have."""
    absent = sorted(find_absent_devices(device_map.values()), key=str)
    named = [device for device in absent if isinstance(device, str)]
    if named:
        raise DeviceMapError(f"the device map uses '{named[0]}', which is not on this machine")
    if absent:
        raise DeviceMapError(
            f"the device map uses accelerator {', '.join(map(str, absent))}; this machine has {describe_devices()}"
        )


def clean_device_map(device_map: Mapping[str, Device], module_name: str = "") -> dict[str, Device]:
    """Return a copy of a map that has a single entry for each module whose parts are all on one device.

    Runs in linear time.

    Args:
        device_map: Device by name of a module or tensor.
        module_name: Name of the module within which entries are merged. Default: "", the whole model.

    Example::

        assert clean_device_map({"block.up": 0, "block.down": 0, "head": 1}) == {"block": 0, "head": 1}
    """
    # Device of all entries inside of each module, or None if they are on several devices.
    device_by_module: dict[str, Device | None] = {}
    count: Counter[str] = Counter()
    for name, device in device_map.items():
        for prefix in _list_prefixes(name):
            count[prefix] += 1
            if device_by_module.setdefault(prefix, device) != device:
                device_by_module[prefix] = None
    merged: dict[str, Device] = {}
    for name, device in device_map.items():
        candidates: list[str] = []  # modules whose entry could replace this one, outermost first
        if not module_name or name == module_name or name.startswith(f"{module_name}."):
            candidates = [prefix for prefix in reversed(_list_prefixes(name)) if prefix.startswith(module_name)]
        mergeable = [each for each in candidates if count[each] > 1 and device_by_module[each] is not None]
        merged[mergeable[0] if mergeable else name] = device
    return merged


def _list_prefixes(name: str) -> list[str]:
    """Return a name and the names of all modules that contain it, innermost first. The last is "", the whole model."""
    prefixes = [name]
    while prefixes[-1]:
        prefixes.append(prefixes[-1].rpartition(".")[0])
    return prefixes


def _format_faults(faults: list[str]) -> str:
    """Return the first faults, each on its own line, and the number of the others."""
    rest = f"\n  and {len(faults) - _SHOWN_FAULTS} more" if len(faults) > _SHOWN_FAULTS else ""
    return "".join(f"\n  {fault}" for fault in faults[:_SHOWN_FAULTS]) + rest
