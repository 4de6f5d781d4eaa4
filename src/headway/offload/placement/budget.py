"""Determine the memory budgets of this machine's devices, as measured or as given by the user."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil
import torch

from headway.common import env
from headway.common.control_groups import list_control_groups
from headway.common.text import parse_bytes
from headway.core.memory.use import read_free_bytes
from headway.core.runtime import process
from headway.core.runtime.device import HARDWARE, Hardware, detect_hardware
from headway.errors import DeviceMapError, HeadwayError
from headway.log import get_logger

logger = get_logger(__name__)

Device = int | str
"""Index of an accelerator, "cpu" or "disk".

An accelerator without an index, such as "mps", is identified by its device type.
"""

UNLIMITED = 1 << 62
"""Budget in bytes for a device without a limit."""
OFFLOAD = ("cpu", "disk")
"""Devices of a device map that store offloaded parts."""


def get_max_memory(max_memory: Mapping[Device, int | str] | None = None) -> dict[Device, int]:
    """Return the bytes that a model may use on each device: first accelerators by index, then "mps", "cpu" and "disk".

    Args:
        max_memory: Limit in bytes, or as text such as "10GiB", by device. A device is an index, "cuda:0", "cuda" (the
            one that this process uses), "mps", "cpu" or "disk". Devices that this machine does not have are accepted,
            for planning. In that case a warning is logged once. None (the default) measures the free memory of each
            accelerator, including unused memory in torch's allocator, and the main memory available within the
            container's limits. Main memory is then left out if an accelerator shares it, and accelerators that do not
            report their free memory are left out with a warning.

    Returns:
        Budget in bytes by device: the given devices, or all that were measured. An accelerator with an index has this
        integer as its key.

    Raises:
        DeviceMapError: If any device or size is invalid, or a device has two budgets. The message lists all such
            faults.
    """
    if max_memory is None:
        return _measure_budgets(detect_hardware())
    budgets = _parse_budgets(max_memory)
    absent = find_absent_devices(budgets)
    if absent:
        logger.warning_once(f"{_describe_absent(absent, max_memory)}: a plan made with it is for another machine")
    return budgets


def check_budget_devices(max_memory: Mapping[Device, int | str] | None) -> None:
    """Raise an error if a memory budget contains a device that this machine does not have.

    Args:
        max_memory: Memory limit by device, or None to check nothing.

    Raises:
        DeviceMapError: If devices or sizes are invalid, or devices are not on this machine.
    """
    if max_memory is None:
        return
    absent = find_absent_devices(_parse_budgets(max_memory))
    if absent:
        raise DeviceMapError(
            f"{_describe_absent(absent, max_memory)}; name devices of this machine, as in max_memory={{'cpu': '8GiB'}}, or leave "
            "it out"
        )


def find_absent_devices(devices: Iterable[Device]) -> list[Device]:
    """Return the devices among `devices` that this machine does not have."""
    hardware = detect_hardware()
    count = 0 if hardware.kind == "cpu" else hardware.count_devices()
    names = (*OFFLOAD, hardware.kind)
    absent = []
    for device in dict.fromkeys(devices):
        is_present = device < count if isinstance(device, int) else device in names
        if not is_present:
            absent.append(device)
    return absent


def describe_devices() -> str:
    """Return text that describes this machine's accelerators, such as "cuda 0 to 3" or "the CPU alone"."""
    hardware = detect_hardware()
    if not hardware.is_indexed:
        return "the CPU alone" if hardware.kind == "cpu" else hardware.kind
    count = hardware.count_devices()
    return f"{hardware.kind} 0" if count == 1 else f"{hardware.kind} 0 to {count - 1}"


def _describe_absent(absent: Sequence[Device], max_memory: Mapping[Device, int | str]) -> str:
    """Return a phrase that says which devices of a memory budget this machine does not have."""
    given = ", ".join(f"{key!r}: {size!r}" for key, size in max_memory.items())
    return f"max_memory={{{given}}} names {', '.join(map(str, absent))}, and this machine has {describe_devices()}"


def _parse_budgets(max_memory: Mapping[Device, int | str]) -> dict[Device, int]:
    """Return the user's memory limits in bytes, in the order in which devices are filled.

    Raises:
        DeviceMapError: If any device or size is invalid, or a device has two budgets.
    """
    budgets: dict[Device, int] = {}
    faults: list[str] = []
    if not isinstance(max_memory, Mapping):
        raise DeviceMapError(
            f"max_memory={max_memory!r} is not a map; give a size for each device, as in max_memory={{0: '20GiB', 'cpu': '8GiB'}}"
        )
    for key, size in max_memory.items():
        try:
            device = parse_device(key)
            if device in budgets:
                raise DeviceMapError(f"device {device} already has a budget under another name; give it only one")
            budgets[device] = parse_bytes(int(size) if isinstance(size, float) else size)
        except HeadwayError as error:
            faults.append(f"{key!r}: {error}")
    if faults:
        raise DeviceMapError("max_memory is invalid: " + "; ".join(faults))
    return {device: budgets[device] for device in sorted(budgets, key=get_fill_order)}


def get_fill_order(device: Device) -> tuple[int, int]:
    """Return a device's sort key. Sorting by it puts devices in the order in which they are filled.

    Accelerators with an index are filled first, by index, then accelerators without an index, the CPU and the disk.
    """
    if isinstance(device, int):
        return (0, device)
    return (1, 1 + OFFLOAD.index(device) if device in OFFLOAD else 0)


def is_accelerator(device: Device) -> bool:
    """Whether the device is neither "cpu" nor "disk"."""
    return device not in OFFLOAD


def parse_device(device: object) -> Device:
    """Convert a description of a device to its form in device maps: an index or a name.

    Args:
        device: Index, "1", "cuda:1", "cuda" (the one that this process uses), a torch.device, "mps", "cpu" or "disk".

    Raises:
        DeviceMapError: If the value has none of these forms, or is "meta", where tensors have no values.
    """
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return device
    if device == "disk":
        return "disk"
    if isinstance(device, str) and device.isdecimal():
        return int(device)
    torch_device = _parse_torch_device(device)
    if torch_device is None:
        raise DeviceMapError(
            f"{device!r} is not a device; give an accelerator's index (0, 1, ...), 'cuda:0', 'mps', 'cpu' or 'disk'"
        )
    if torch_device.type == "meta":
        raise DeviceMapError("'meta' devices have no values; give 'cpu', 'disk' or an accelerator")
    hardware = HARDWARE.get(torch_device.type)
    if hardware is not None and not hardware.is_indexed:  # there is only one, such as the CPU
        return torch_device.type
    return _get_own_index(torch_device.type) if torch_device.index is None else torch_device.index


def _parse_torch_device(device: object) -> torch.device | None:
    """Return the device that a text or a torch.device describes, or None for any other value."""
    if not isinstance(device, (str, torch.device)):
        return None
    try:
        return torch.device(device)
    except RuntimeError:
        return None


def _get_own_index(device_type: str) -> int:
    """Return the index of the device of this type that this process uses or will use.

    Once an Accelerator exists, it is the index of the Accelerator's device, or 0 if that device has another type. Before,
    it is the index of torch's current device if that is above 0, else the local rank. 0 if there is no such device.

    Args:
        device_type: Device type, such as "cuda".
    """
    if process.is_started():
        own = process.current().device
        return (own.index or 0) if own.type == device_type else 0
    hardware = HARDWARE.get(device_type)
    if hardware is None or not hardware.is_available():
        return 0
    is_initialized = hardware.find_function("is_initialized")
    get_current = hardware.find_function("current_device")
    # `current_device()` alone would initialize the device, which takes memory on it.
    is_in_use = is_initialized is not None and bool(is_initialized())
    current = int(get_current()) if is_in_use and get_current is not None else 0
    if current:  # device 0 is also torch's current device if no device was chosen
        return current
    local_rank = env.get_local_rank()
    return local_rank if local_rank < hardware.count_devices() else 0


def _measure_budgets(hardware: Hardware) -> dict[Device, int]:
    """Return the free bytes of each device of this machine, in the order in which devices are filled.

    See `get_max_memory` for the devices that are left out.
    """
    free: dict[Device, int] = {}
    if hardware.kind != "cpu" and not hardware.is_indexed:
        return {hardware.kind: measure_available_memory()}
    if hardware.find_memory_function("mem_get_info") is None and hardware.kind != "cpu":
        logger.warning_once(
            f"{hardware.kind} devices do not report how much memory is free, so no part of a model is placed on them; set a "
            f"limit for each, such as max_memory={{0: '8GiB', 'cpu': '16GiB'}}"
        )
        return {"cpu": measure_available_memory()}
    shares_main_memory = False
    for index in range(hardware.count_devices() if hardware.kind != "cpu" else 0):
        try:
            free[index] = _measure_free(hardware, index)
        except RuntimeError as error:
            logger.warning(f"{hardware.kind}:{index} does not respond and is left out: {error}")
            continue
        describe = hardware.find_function("get_device_properties")
        shares_main_memory |= describe is not None and bool(getattr(describe(index), "is_integrated", False))
    if not shares_main_memory:
        free["cpu"] = measure_available_memory()
    return free


def _measure_free(hardware: Hardware, index: int) -> int:
    """Return the free bytes of an accelerator, including memory that torch's allocator has reserved but does not use."""
    device = torch.device(hardware.kind, index)
    get_reserved = hardware.find_memory_function("memory_reserved")
    get_allocated = hardware.find_memory_function("memory_allocated")
    cached = 0
    if get_reserved is not None and get_allocated is not None:
        cached = max(0, int(get_reserved(device)) - int(get_allocated(device)))
    return read_free_bytes(hardware, device) + cached


def measure_available_memory(root: Path = Path("/")) -> int:
    """Return the bytes of main memory that this process can still allocate within the machine's and container's limits.

    Args:
        root: Folder that contains `proc` and `sys`, from which the limits are read. Default: "/".
    """
    limits = [group.available_bytes for group in list_control_groups(root)]
    return min([int(psutil.virtual_memory().available), *(limit for limit in limits if limit is not None)])
