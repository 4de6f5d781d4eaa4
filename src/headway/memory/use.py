"""How much memory is in use, of the host and of each device: by torch's allocator, by the driver, by process.

What a process's tensors hold comes from torch's allocators; what the device holds for all processes, and which ones they are,
from NVML (package nvidia-ml-py, optional); the host's from psutil and the limits of the control group.

How many bytes a device can still give this process, asked so that the question itself takes none.
"""

import ctypes
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headway.common import optional
from headway.common.optional import Later
from headway.errors import ConfigError, DeviceUnavailable
from headway.launch.machine import control_groups
from headway.runtime import process
from headway.runtime.device import HARDWARE, Hardware

psutil = Later("psutil")

MIB = 1024**2


@dataclass(frozen=True)
class MemoryUse:
    """The memory of one device, or of the host, at one moment; all in bytes.

    Attributes:
        device: "cuda:0", "cpu", ...
        used: what this process's tensors hold; on the host, this process's resident memory.
        reserved: what torch's allocator holds of the device, used or cached; on the host, this process's address space.
        peak: the highest `used` since it was last reset (`MemoryMonitor` and automatic micro-batching do), else since the start.
        total: what there is; on the host the control group's limit where that is lower.
        occupied: what all processes together hold.
        utilisation: how busy the device's cores are, 0 to 1; None where nothing tells.
        processes: bytes by process id, as far as they are known; on the host, this process and its children.
        source: who says so.
    """

    device: str
    used: int
    reserved: int
    peak: int
    total: int
    occupied: int
    utilisation: float | None = None
    processes: dict[int, int] = field(default_factory=dict)
    source: str = ""

    @property
    def free(self) -> int:
        """What no process holds."""
        return max(0, self.total - self.occupied)


def memory_use(device: torch.device | str | None = None) -> MemoryUse:
    """The use of one device.

    Args:
        device: "cuda:0", "cpu", ...; None: the one that this process computes on.

    Raises:
        ConfigError: it is not a device, or holds no values.
        DeviceUnavailable: this machine does not have it.
    """
    chosen = device_of(device)
    if chosen.type == "cpu":
        return _host()
    return _device(HARDWARE[chosen.type], chosen)


def device_of(device: torch.device | str | None) -> torch.device:
    """The device that is meant, which this machine has; None: the one that this process computes on.

    Raises:
        ConfigError: it is not a device, or holds no values.
        DeviceUnavailable: this machine does not have it.
    """
    if device is None:
        return process.current().device
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"device={device!r} is not a device; give 'cpu', 'cuda:0' or another of torch's names"
        ) from error
    hardware = HARDWARE.get(chosen.type)
    if hardware is None:
        raise ConfigError(f"the memory of device={device!r} is not measured; allowed: {', '.join(HARDWARE)}")
    if not hardware.is_available() or (chosen.index or 0) >= hardware.num_devices():
        here = ", ".join(HARDWARE)
        raise DeviceUnavailable(f"this machine has no {chosen}; it has {here}. Leave the device out for the one in use")
    return chosen


def all_memory_use() -> list[MemoryUse]:
    """The use of the host and of every device that this process sees and whose memory something counts."""
    found = [_host()]
    for hardware in HARDWARE.values():
        if hardware.kind != "cpu" and _is_counted(hardware):
            found += [_device(hardware, torch.device(hardware.kind, index)) for index in range(hardware.num_devices())]
    return found


# ---------------------------------------------------------------- the host


def _host() -> MemoryUse:
    own = psutil.Process()
    info, machine = own.memory_info(), psutil.virtual_memory()
    limit, held = control_group()
    is_limited = limit is not None and limit < machine.total
    processes = {own.pid: int(info.rss)}
    for child in own.children(recursive=True):
        try:
            processes[child.pid] = int(child.memory_info().rss)
        except psutil.Error:  # it has ended meanwhile
            continue
    return MemoryUse(
        "cpu",
        int(info.rss),
        int(info.vms),
        max(host_peak(), int(info.rss)),
        limit if is_limited and limit else machine.total,
        held if is_limited else machine.total - machine.available,
        psutil.cpu_percent() / 100,
        processes,
        "psutil and the control group's limit" if is_limited else "psutil",
    )


def host_peak() -> int:
    """The highest resident memory of this process so far, in bytes (since the last reset, where the kernel can reset)."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024


def control_group(root: Path = Path("/")) -> tuple[int | None, int]:
    """The lowest memory limit of this process's control group and its parents, and what that group holds.

    Args:
        root: where `proc` and `sys` lie.

    Returns:
        (limit in bytes or None, bytes held under that limit).
    """
    limited = [(limit, group.held or 0) for group in control_groups(root) if (limit := group.limit) is not None]
    return min(limited, key=lambda found: found[0], default=(None, 0))


# ---------------------------------------------------------------- devices


def _is_counted(hardware: Hardware) -> bool:
    names = ("memory_allocated", "current_allocated_memory")
    return any(hardware.memory_ability(name) is not None for name in names)


def _device(hardware: Hardware, device: torch.device) -> MemoryUse:
    own = os.getpid()

    def ask(name: str) -> int:
        function = hardware.memory_ability(name)
        return 0 if function is None else int(function(device) if hardware.is_indexed else function())

    used = ask("memory_allocated") or ask("current_allocated_memory")
    reserved = max(ask("memory_reserved") or ask("driver_allocated_memory"), used)
    total, occupied = ask("recommended_max_memory"), reserved
    told = _driver_word(hardware, device)
    if told is not None:
        total, occupied = told.total, told.occupied
    elif hardware.memory_ability("mem_get_info") is not None:
        free, total = free_and_total(hardware, device)
        occupied = total - free
    return MemoryUse(
        str(device),
        used,
        reserved,
        max(ask("max_memory_allocated"), used),
        total,
        occupied,
        None if told is None else told.utilisation,
        {own: reserved} if told is None else told.processes,
        _source(hardware, told is not None),
    )


def _source(hardware: Hardware, has_told: bool) -> str:
    if not _is_counted(hardware):
        return "the driver, by NVML" if has_told else f"none: torch does not count memory of {hardware.kind}"
    return "torch's allocator and NVML" if has_told else "torch's allocator"


@dataclass(frozen=True)
class _Told:
    total: int
    occupied: int
    utilisation: float | None
    processes: dict[int, int]


@contextmanager
def _nvml() -> Iterator[Any]:
    """NVML, started for the block; None where the package or the driver is missing."""
    if not optional.available("pynvml"):
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


def _driver_word(hardware: Hardware, device: torch.device) -> _Told | None:
    describe = hardware.ability("get_device_properties")
    unique = getattr(describe(device), "uuid", None) if describe is not None else None
    with _nvml() as library:
        if library is None or unique is None:
            return None
        try:
            # By its id: CUDA_VISIBLE_DEVICES renumbers what torch sees, and NVML numbers all that there are.
            return _read(library, library.nvmlDeviceGetHandleByUUID(f"GPU-{unique}"))
        except library.NVMLError:  # a slice of a device (MIG) has another id
            return None


def _read(library: Any, handle: Any) -> _Told:
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
    return _Told(int(memory.total), int(memory.used), busy, {p.pid: int(p.usedGpuMemory or 0) for p in running})


def gpu_memory_occupied() -> int | None:
    """Bytes that all processes hold on all GPUs of this machine; None where there is none."""
    with _nvml() as library:
        if library is not None:
            handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
            return sum(int(library.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)
    devices = [use for use in all_memory_use() if use.device != "cpu"]
    return sum(use.occupied for use in devices) if devices else None


# ---------------------------------------------------------------- as notebooks print it


def print_gpu_utilization() -> None:
    """Print what all processes hold on all GPUs of this machine; without a GPU, what this process holds of the host.

    In a run of several processes the main one prints.
    """
    if not process.current().is_main_process:
        return
    occupied = gpu_memory_occupied()
    if occupied is not None:
        print(f"GPU memory occupied: {occupied // MIB} MB.")
    else:
        print(
            f"GPU memory occupied: none, there is no GPU here. Host memory of this process: {_host().used // MIB} MB."
        )


def print_summary(result: Any) -> None:
    """Print time, speed and memory of a finished training.

    Args:
        result: an object with `metrics` (as a trainer's train() returns), or those metrics: a dict that holds
            `train_runtime` in seconds and `train_samples_per_second`.

    Raises:
        ConfigError: these metrics are not there.
    """
    metrics = getattr(result, "metrics", result)
    needed = ("train_runtime", "train_samples_per_second")
    if not isinstance(metrics, Mapping) or not all(name in metrics for name in needed):
        found = sorted(metrics) if isinstance(metrics, Mapping) else type(metrics).__name__
        raise ConfigError(f"print_summary needs {' and '.join(needed)}; it got {found}. Give what train() returned")
    if process.current().is_main_process:
        print(f"Time: {metrics['train_runtime']:.2f}")
        print(f"Samples/second: {metrics['train_samples_per_second']:.2f}")
    print_gpu_utilization()


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
