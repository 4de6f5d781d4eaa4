"""How many bytes a device can still give this process, asked so that the question itself takes none."""

import ctypes
import importlib
import sys
from pathlib import Path
from typing import Any

import torch

from headway.runtime.device import Hardware

CONTEXT_BYTES = 512 << 20
"""What the driver takes for itself when a process first uses a device: 300 to 600 MB, by driver and kind of GPU."""


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def free_bytes(hardware: Hardware, device: torch.device) -> int:
    """Bytes that the driver can still give this process on a device; what torch's allocator holds unused comes on top.

    Where this process holds nothing, a context's bytes are left for the day it uses the device.

    Args:
        hardware: what kind of device.
        device: which one, with its index where the kind has several.
    """
    reserved = _reserved(hardware, device)
    told = None if reserved else _told_by_driver(hardware, device)
    free = _told_by_runtime(hardware, device)[0] if told is None else told[0] - CONTEXT_BYTES
    fraction = _fraction(hardware, device)
    if fraction < 1:
        free = min(free, int(hardware.module.get_device_properties(device).total_memory * fraction) - reserved)
    return max(0, free)


def free_address_space() -> int | None:
    """Bytes that this process may still map before a limit of its address space (`ulimit -v`) is reached; None: there is no limit.

    Only under such a limit does host memory run out with an error; elsewhere the system ends a process.
    """
    if not sys.platform.startswith("linux"):
        return None
    resource: Any = importlib.import_module("resource")
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    mapped: int = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return max(0, int(limit) - mapped)


def free_and_total(hardware: Hardware, device: torch.device) -> tuple[int, int]:
    """Bytes of a device that no process holds, and all that it has.

    CUDA's own question (mem_get_info) opens a context on the device, which then takes some hundred MB until the process
    ends: on 8 GPUs, 8 times from each of 8 ranks. So where this process holds nothing, the driver's library (NVML) is asked
    first; without it CUDA is asked all the same.
    """
    told = None if _reserved(hardware, device) else _told_by_driver(hardware, device)
    return _told_by_runtime(hardware, device) if told is None else told


def _reserved(hardware: Hardware, device: torch.device) -> int:
    """Bytes that torch's allocator holds there; 0 also where nothing counts them."""
    ask = hardware.memory_ability("memory_reserved")
    return 0 if ask is None else int(ask(device))


def _fraction(hardware: Hardware, device: torch.device) -> float:
    """The part of the device that the user left to this process (`set_per_process_memory_fraction`)."""
    ask = hardware.ability("get_per_process_memory_fraction")
    return 1.0 if ask is None else float(ask(device))


def _told_by_runtime(hardware: Hardware, device: torch.device) -> tuple[int, int]:
    ask = hardware.memory_ability("mem_get_info")
    assert ask is not None, "whoever calls has seen to it"
    free, total = ask(device)
    return int(free), int(total)


def _told_by_driver(hardware: Hardware, device: torch.device) -> tuple[int, int] | None:
    """Free and all bytes, by NVML; None where it is missing, or does not know the device (a slice has another id)."""
    describe = hardware.ability("get_device_properties")
    uuid = getattr(describe(device), "uuid", None) if describe is not None else None
    library = None if uuid is None else _load()
    if library is None or library.nvmlInit_v2() != 0:
        return None
    handle, memory = ctypes.c_void_p(), _Memory()
    try:
        # By its id: CUDA_VISIBLE_DEVICES renumbers what torch sees, and NVML numbers all that there are.
        if library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)) != 0:
            return None
        asked = library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        return (int(memory.free), int(memory.total)) if asked == 0 else None
    finally:
        library.nvmlShutdown()


def _load() -> Any:
    """The driver's own library, which comes with it; the Python package for it is not needed."""
    try:
        return ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    except OSError:
        return None
