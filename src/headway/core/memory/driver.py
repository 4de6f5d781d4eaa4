"""Memory that NVIDIA's driver reports for all processes, read from NVML by its Python package or through ctypes.

NVML is the management library of NVIDIA's driver. Its Python package (nvidia-ml-py) is optional. For the free memory of a
device, which is needed often, the library is called without the package. A query of NVML needs no CUDA context, which
would take several hundred MB of the device.
"""

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
    uuid = _find_uuid(hardware, device)
    with open_nvml() as library:
        if library is None or uuid is None:
            return None
        try:
            return _read_report(library, library.nvmlDeviceGetHandleByUUID(uuid))
        except library.NVMLError:  # a slice of a device (MIG) has another id
            return None


def _find_uuid(hardware: Hardware, device: torch.device) -> str | None:
    """Return the ID by which NVML knows a device, or None if torch does not know it.

    The index would not do: CUDA_VISIBLE_DEVICES renumbers torch's devices, while NVML numbers all devices.
    """
    get_properties = hardware.find_function("get_device_properties")
    uuid = None if get_properties is None else getattr(get_properties(device), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"


def _read_report(library: Any, handle: Any) -> DriverReport:
    """Return the report on a device. Values that the driver does not report are None or empty.

    Args:
        library: The module `pynvml`, initialized.
        handle: NVML's handle of the device.
    """
    memory = library.nvmlDeviceGetMemoryInfo(handle)
    try:
        utilization = library.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except library.NVMLError:
        utilization = None
    try:
        running = library.nvmlDeviceGetComputeRunningProcesses(handle)
    except library.NVMLError:
        running = []
    # The driver hides the sizes of other users' processes.
    processes = {each.pid: int(each.usedGpuMemory or 0) for each in running}
    return DriverReport(int(memory.total), int(memory.used), utilization, processes)


class _Memory(ctypes.Structure):
    """Result structure of NVML's memory query (`nvmlMemory_t`), for calls through ctypes."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def read_memory_by_driver(hardware: Hardware, device: torch.device) -> tuple[int, int] | None:
    """Return the free and the total bytes of a device from NVML, through ctypes.

    Return None if NVML is missing or does not know the device, such as a MIG slice, which has another ID.
    """
    uuid = _find_uuid(hardware, device)
    library = None if uuid is None else _load_nvml()
    if uuid is None or library is None or library.nvmlInit_v2() != 0:
        return None
    handle, memory = ctypes.c_void_p(), _Memory()
    try:
        # NVML's functions return 0 if they succeed.
        if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != 0:
            return None
        if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
            return None
        return int(memory.free), int(memory.total)
    finally:
        library.nvmlShutdown()


def _load_nvml() -> Any:
    """Load the driver's own NVML library, which needs no Python package. Return None if it is missing."""
    try:
        return ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    except OSError:
        return None
