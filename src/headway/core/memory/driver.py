"""Memory that NVIDIA's driver reports for all processes, read from NVML by its Python package or through ctypes."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from headway.common import optional
from headway.core.runtime.device import Hardware


@dataclass(frozen=True)
class DriverReport:
    """Memory and activity of a device, as reported by its driver.

    Attributes:
        total: Capacity of the device in bytes.
        occupied: Bytes in use by all processes.
        utilization: Fraction of recent time in which the device was busy, from 0 to 1. None if it is not reported.
        processes: Bytes in use by process ID; 0 for a process whose size the driver hides.
    """

    total: int
    occupied: int
    utilization: float | None
    processes: dict[int, int]


@contextmanager
def open_nvml() -> Iterator[Any]:
    """Return a context in which NVML is initialized.

    The context's value is the module `pynvml`, or None if this Python package or the driver is missing.
    """
    if not optional.is_available("pynvml"):
        yield None
        return
    library = optional.require("pynvml", "memory of NVIDIA devices needs", "nvidia-ml-py")
    try:
        library.nvmlInit()
    except library.NVMLError:
        yield None
        return
    try:
        yield library
    finally:
        library.nvmlShutdown()


def read_driver_report(hardware: Hardware, device: torch.device) -> DriverReport | None:
    """Return NVML's report on a device.

    Return None if NVML is not available or does not know the device, such as a MIG slice.
    """
    describe = hardware.find_function("get_device_properties")
    unique = getattr(describe(device), "uuid", None) if describe is not None else None
    with open_nvml() as library:
        if library is None or unique is None:
            return None
        try:
            # Look the device up by its ID: CUDA_VISIBLE_DEVICES renumbers torch's devices, while NVML numbers all devices.
            return _read_report(library, library.nvmlDeviceGetHandleByUUID(f"GPU-{unique}"))
        except library.NVMLError:  # a slice of a device (MIG) has another id
            return None


def _read_report(library: Any, handle: Any) -> DriverReport:
    memory = library.nvmlDeviceGetMemoryInfo(handle)
    try:
        busy = library.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except library.NVMLError:
        busy = None
    try:
        running = library.nvmlDeviceGetComputeRunningProcesses(handle)
    except library.NVMLError:
        running = []
    # The driver hides the sizes of other users' processes.
    return DriverReport(int(memory.total), int(memory.used), busy, {p.pid: int(p.usedGpuMemory or 0) for p in running})


class _Memory(ctypes.Structure):
    """Result structure of NVML's memory query (`nvmlMemory_t`), for calls through ctypes."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def read_memory_by_driver(hardware: Hardware, device: torch.device) -> tuple[int, int] | None:
    """Return the free and the total bytes of a device from NVML.

    Return None if NVML is missing or does not know the device, such as a MIG slice, which has another ID.
    """
    describe = hardware.find_function("get_device_properties")
    uuid = getattr(describe(device), "uuid", None) if describe is not None else None
    library = None if uuid is None else _load_nvml()
    if library is None or library.nvmlInit_v2() != 0:
        return None
    handle, memory = ctypes.c_void_p(), _Memory()
    try:
        # Look the device up by its ID: CUDA_VISIBLE_DEVICES renumbers torch's devices, while NVML numbers all devices.
        if library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)) != 0:
            return None
        asked = library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        return (int(memory.free), int(memory.total)) if asked == 0 else None
    finally:
        library.nvmlShutdown()


def _load_nvml() -> Any:
    """Load the driver's own NVML library, which needs no Python package. Return None if it is missing."""
    try:
        return ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    except OSError:
        return None
