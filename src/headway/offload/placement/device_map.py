"""Device maps: which part of a model lies on which device, inferred or checked; and so where each tensor's home is.

Homes: where each tensor of a model stays by its device map, settled once for loading it and for running it.
"""

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from headway.common.text import format_bytes, listed
from headway.errors import DeviceMapError
from headway.log import get_logger
from headway.offload.placement.budget import (
    UNLIMITED,
    Device,
    absent_from_here,
    as_device,
    devices_here,
    get_max_memory,
    is_accelerator,
)
from headway.offload.placement.sizes import Dtype, find_tied_parameters
from headway.offload.placement.solver import Solution, balance, smallest_first, solve
from headway.offload.placement.survey import ModuleTree, PlacementReport, account_of, survey
from headway.offload.placement.workload import Workload
from headway.runtime.device import detect
from headway.weights.names import TensorLocation, places_of, tied_groups

logger = get_logger(__name__)

STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
_SHOWN_FAULTS = 20


class DeviceMap(dict[str, Device]):
    """{module or tensor name: device}; a plain dict that also knows what it was made from.

    Attributes:
        plan: budgets and loads of each device; None where the map was written by hand.
    """

    def __init__(
        self, entries: Mapping[str, Device] | Iterable[tuple[str, Device]] = (), plan: PlacementReport | None = None
    ):
        super().__init__(entries)
        self.plan = plan

    @property
    def main_device(self) -> Device:
        """Where inputs go and offloaded layers run: the first accelerator in the map, else the CPU."""
        return next((device for device in self.values() if is_accelerator(device)), "cpu")

    def explain(self) -> str:
        """A table of what went where: bytes, budget and headroom of each device."""
        if self.plan is None:
            return "\n".join(f"{name or 'the whole model'}: {device}" for name, device in self.items())
        return self.plan.table()


def device_of(device_map: Mapping[str, Device], name: str) -> Device:
    """The device of a module or tensor: that of the longest entry that contains it.

    Raises:
        DeviceMapError: no entry does.
    """
    entry = next((prefix for prefix in _prefixes(name) if prefix in device_map), None)
    if entry is None:
        raise DeviceMapError(
            f"{name!r} has no place in the device map; its entries are {listed([repr(name) for name in device_map], 8)}"
        )
    return device_map[entry]


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: Iterable[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
    workload: Workload | None = None,
) -> DeviceMap:
    """Place the model's layers on devices, first devices first, so that they fit and run.

    The layers go to the devices in order, in consecutive runs; a placement on accelerators alone is found whenever there
    is a consecutive one. Where there is none, the last layers are offloaded, as few as can be, to main memory and then to
    disk; the first accelerator in use keeps room for the largest of them, which runs there. Layers that share tensors
    stay together, at the place of the first, and no device is left empty that could hold an offloaded layer.

    Args:
        model: on any device, the meta device included.
        max_memory: as of get_max_memory. The disk has no limit unless one is given.
        no_split_module_classes: class names of modules whose parts must lie on one device (blocks with a residual
            connection). Modules without children are never divided.
        dtype: what the model will be loaded with.
        special_dtypes: {tensor name: dtype} that come before `dtype`.
        verbose: log the table that DeviceMap.explain gives.
        clean_result: one entry for a module that lies on one device as a whole; False gives one for each unit.
        offload_buffers: offload buffers too. False keeps those of offloaded layers on the main device, and counts them.
        fallback_allocation: taken for compatibility; devices are never left empty without need.
        workload: what will be run, so that the first forward fits too: KV cache and activations are counted in.

    Returns:
        A DeviceMap, which is a dict.

    Raises:
        DeviceMapError: a budget is none, or the largest layer fits nowhere.
    """
    surveyed = survey(model, no_split_module_classes, dtype, special_dtypes, offload_buffers, workload)
    return _infer(surveyed, get_max_memory(max_memory), clean_result, verbose)


def _infer(surveyed: ModuleTree, budgets: dict[Device, int], clean_result: bool, verbose: bool = False) -> DeviceMap:
    compute, stores = _roles(budgets)
    if not compute:
        return DeviceMap({"" if clean_result else name: "disk" for name in surveyed.names})
    solution = _solve(surveyed, budgets, compute, stores)
    if solution is None and compute != ["cpu"]:
        name, size = surveyed.largest()
        logger.warning(
            f"no accelerator in {_shown(budgets)} has room to run the largest offloaded layer ({name} is "
            f"{format_bytes(size)}); the model is placed on the CPU"
        )
        compute, stores = (["cpu"] if budgets.get("cpu") else []), ["disk"]
        solution = _solve(surveyed, budgets, compute, stores) if compute else None
    if solution is None:
        name, size = surveyed.largest()
        raise DeviceMapError(
            f"the model does not fit {_shown(budgets)}: what is offloaded must at least run on one device, and its largest "
            f"layer ({name}) takes {format_bytes(size)}. Raise max_memory, load in a smaller dtype, or let it be "
            "divided: take its class out of no_split_module_classes"
        )
    devices: list[Device] = [*compute, *stores]
    entries = {name: devices[i] for name, i in surveyed.device_map(solution.device).items()}
    plan = account_of(surveyed, solution, devices, len(compute), budgets)
    result = DeviceMap(clean_device_map(entries) if clean_result else entries, plan)
    if verbose:
        logger.info(result.explain())
    return result


def _roles(budgets: Mapping[Device, int]) -> tuple[list[Device], list[Device]]:
    """(devices that compute, devices that only store), in the order of filling."""
    accelerators = [device for device, size in budgets.items() if is_accelerator(device) and size > 0]
    has_cpu = budgets.get("cpu", 0) > 0
    if accelerators:
        return accelerators, ["cpu", "disk"] if has_cpu else ["disk"]
    return (["cpu"] if has_cpu else []), ["disk"]


def _solve(
    surveyed: ModuleTree, budgets: Mapping[Device, int], compute: list[Device], stores: list[Device]
) -> Solution | None:
    rooms = [budgets[device] for device in compute]
    return solve(surveyed.parts, rooms, [budgets.get(store, UNLIMITED) for store in stores], compute == ["cpu"])


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: Iterable[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    low_zero: bool = False,
    offload_buffers: bool = False,
    workload: Workload | None = None,
) -> dict[Device, int]:
    """Budgets with which infer_auto_device_map, given the same arguments, fills the accelerators evenly.

    The largest load is as small as a consecutive placement allows. The last accelerator keeps its whole budget, and so do
    all where the model does not fit them. With one accelerator and `max_memory=None`, a tenth of it is left free.

    Args:
        low_zero: leave as much room as can be on the first accelerator (e.g. for generation) and balance the others.

    The other arguments and errors are those of infer_auto_device_map.
    """
    budgets = get_max_memory(max_memory)
    surveyed = survey(model, no_split_module_classes, dtype, special_dtypes, offload_buffers, workload)
    return _balanced(surveyed, budgets, low_zero, max_memory is None)


def _balanced(surveyed: ModuleTree, budgets: dict[Device, int], low_zero: bool, is_measured: bool) -> dict[Device, int]:
    devices = [device for device, size in budgets.items() if is_accelerator(device) and size > 0]
    if not devices:
        return budgets
    if len(devices) == 1:
        return {**budgets, devices[0]: budgets[devices[0]] * 9 // 10} if is_measured else budgets
    rooms = [budgets[device] for device in devices]
    if not low_zero:
        loads = balance(surveyed.parts, rooms)
    elif (others := balance(surveyed.parts, rooms[1:])) is not None:
        loads = [0, *others]
    else:
        loads = smallest_first(surveyed.parts, rooms)
    return budgets if loads is None else {**budgets, **dict(zip(devices[:-1], loads[:-1]))}


def resolve_device_map(
    model: nn.Module,
    device_map: str | int | torch.device | Mapping[str, Device | torch.device],
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: Iterable[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    offload_buffers: bool = False,
    workload: Workload | None = None,
) -> DeviceMap:
    """Turn whatever a user gives as `device_map` into one that covers the model.

    Args:
        device_map: "auto" and "balanced" (the same), "balanced_low_0", "sequential", one device for all, or a map.

    The other arguments are those of infer_auto_device_map; `no_split_module_classes=None` takes the model's own
    `_no_split_modules`.

    Raises:
        DeviceMapError: an unknown word, or a map with faults; all of them are listed.
    """
    if isinstance(device_map, Mapping):
        check_device_map(model, device_map)
        given = {name: as_device(device) for name, device in device_map.items()}
        _check_presence(given)
        return DeviceMap(given, getattr(device_map, "plan", None))
    if device_map not in STRATEGIES:
        try:
            device = as_device(device_map)
        except DeviceMapError as error:
            raise DeviceMapError(
                f"device_map={device_map!r} is neither one of {', '.join(STRATEGIES)}, nor a map, nor a device: {error}"
            ) from None
        _check_presence({"": device})
        return DeviceMap({"": device})
    classes = getattr(model, "_no_split_modules", None) if no_split_module_classes is None else no_split_module_classes
    budgets = get_max_memory(max_memory)
    surveyed = survey(model, classes, dtype, special_dtypes, offload_buffers, workload)
    if device_map != "sequential":
        budgets = _balanced(surveyed, budgets, device_map == "balanced_low_0", max_memory is None)
    return _infer(surveyed, budgets, clean_result=True)


def check_device_map(model: nn.Module, device_map: Mapping[str, Device | torch.device]) -> None:
    """Check that the map fits the model: every tensor has a place, every entry is of the model, every device is one.

    Raises:
        DeviceMapError: with all faults.
    """
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    tensors = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    tensors += [name for name, _ in model.named_buffers(remove_duplicate=False)]
    names.update(tensors)
    faults: list[str] = []
    for name, device in device_map.items():
        if name not in names:
            depth = str(name).count(".")
            near = difflib.get_close_matches(str(name), [other for other in names if other.count(".") == depth], n=1)
            faults.append(f"the model has no {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        try:
            as_device(device)
        except DeviceMapError as error:
            faults.append(f"{name!r}: {error}")
    missing = [name for name in tensors if not any(prefix in device_map for prefix in _prefixes(name))]
    faults += [f"{name!r} has no place" for name in missing]
    if faults:
        raise DeviceMapError(f"the device map does not fit {type(model).__name__}:{_listed(faults)}")
    readable = {name: as_device(device) for name, device in device_map.items()}
    for group in find_tied_parameters(model):
        places = {device_of(readable, name) for name in group}
        if len(places) > 1:
            logger.warning(f"{', '.join(group)} are one parameter, placed on {len(places)} devices: each gets a copy")


def _check_presence(device_map: Mapping[str, Device]) -> None:
    """Are the devices on this machine?"""
    absent = sorted(absent_from_here(device_map.values()), key=str)
    named = [device for device in absent if isinstance(device, str)]
    if named:
        raise DeviceMapError(f"the device map uses '{named[0]}', which is not on this machine")
    if absent:
        raise DeviceMapError(
            f"the device map uses accelerator {', '.join(map(str, absent))}; this machine has {devices_here()}"
        )


def clean_device_map(device_map: Mapping[str, Device], module_name: str = "") -> dict[str, Device]:
    """Merge entries: a module with several entries, all on one device, gets one. Linear; gives a new dict.

    Args:
        module_name: merge only within this module.
    """
    uniform: dict[str, Device | None] = {}
    count: Counter[str] = Counter()
    for name, device in device_map.items():
        for prefix in _prefixes(name):
            count[prefix] += 1
            if uniform.setdefault(prefix, device) != device:
                uniform[prefix] = None
    merged: dict[str, Device] = {}
    for name, device in device_map.items():
        within = name == module_name or not module_name or name.startswith(f"{module_name}.")
        inside = [p for p in _prefixes(name) if not module_name or p.startswith(module_name)] if within else []
        best = next((p for p in reversed(inside) if count[p] > 1 and uniform[p] is not None), name)
        merged[best] = device
    return merged


def _prefixes(name: str) -> list[str]:
    """The name, and those of all modules that contain it, the whole model last."""
    found = [name]
    while found[-1]:
        found.append(found[-1].rpartition(".")[0])
    return found


def _listed(faults: list[str]) -> str:
    rest = f"\n  and {len(faults) - _SHOWN_FAULTS} more" if len(faults) > _SHOWN_FAULTS else ""
    return "".join(f"\n  {fault}" for fault in faults[:_SHOWN_FAULTS]) + rest


def _shown(budgets: Mapping[Device, int]) -> str:
    return "{" + ", ".join(f"{device}: {format_bytes(size)}" for device, size in budgets.items()) + "}"


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
