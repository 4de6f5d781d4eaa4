"""Memory in use on the host and on each device: by torch's allocator, by the driver, and by process.

Memory of this process's tensors is read from torch's allocators. Memory of all processes on a device is read from
NVML (package nvidia-ml-py, optional). The host's memory is read from psutil and the limits of the control group. Free
memory of a device is queried in a way that does not itself allocate a CUDA context.
"""

import importlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headway.common.control_groups import list_control_groups
from headway.common.optional import LazyModule
from headway.core.memory.driver import read_driver_report, read_memory_by_driver
from headway.core.runtime import process
from headway.core.runtime.device import HARDWARE, Hardware
from headway.errors import ConfigError, DeviceUnavailable

psutil = LazyModule("psutil")


CONTEXT_BYTES = 512 << 20
"""Estimated bytes that the driver takes when a process first uses a device: 300 to 600 MB, depending on driver and
GPU.
"""


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one device, or of the host, at one moment. All sizes are in bytes.

    Attributes:
        device: Device name such as "cuda:0" or "cpu".
        used: Memory of this process's tensors; on the host, this process's resident memory.
        reserved: Memory that torch's allocator holds, in use or cached; on the host, this process's address space.
        peak: Highest `used` since the last reset (by `MemoryMonitor` or automatic micro-batching), or since the start.
        total: Total memory; on the host, the control group's limit if that is lower. 0 if unknown.
        occupied: Memory held by all processes together; `reserved` if the device reports only this process's memory.
        utilization: Utilization of the device's cores, 0 to 1; None if unknown.
        processes: Bytes by process ID, as far as known; on the host, this process and its children.
        source: Origin of the numbers.
    """

    device: str
    used: int
    reserved: int
    peak: int
    total: int
    occupied: int
    utilization: float | None = None
    processes: dict[int, int] = field(default_factory=dict)
    source: str = ""

    @property
    def utilisation(self) -> float | None:
        """Former name of `utilization`, which is kept for one more release. None if unknown."""
        return self.utilization

    @property
    def free(self) -> int:
        """Bytes that no process holds: `total` minus `occupied`, at least 0."""
        return max(0, self.total - self.occupied)


def memory_use(device: torch.device | str | None = None) -> MemoryUse:
    """Return the memory use of one device, or of the host, at this moment.

    Any rank may call it alone. It does not wait for work that is queued on the device.

    Args:
        device: Device such as "cuda:0". "cpu": the host. None (the default): the device that this process computes on.

    Returns:
        Sizes in bytes, such as `used` (this process's tensors), `peak`, `free` and `total`.

    Raises:
        ConfigError: If `device` is not a valid device, or its memory cannot be measured.
        DeviceUnavailable: If this machine does not have the device.

    Example::

        use = memory_use("cpu")
        print(f"{use.used / 2**30:.1f} GiB of {use.total / 2**30:.1f} GiB")
    """
    chosen = check_device(device)
    if chosen.type == "cpu":
        return measure_host()
    return _measure_device(HARDWARE[chosen.type], chosen)


def check_device(device: torch.device | str | None) -> torch.device:
    """Return a device of this machine as a `torch.device`, or raise an error if its memory cannot be measured.

    Args:
        device: Device such as "cuda:0" or "cpu". None: the one that this process computes on.

    Raises:
        ConfigError: If `device` is not a valid device, or its memory cannot be measured.
        DeviceUnavailable: If this machine does not have the device.
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
    if not hardware.is_available() or (chosen.index or 0) >= hardware.count_devices():
        kinds = ", ".join(HARDWARE)
        raise DeviceUnavailable(
            f"this machine has no {chosen}; it has {kinds}. Leave the device out for the one in use"
        )
    return chosen


def all_memory_use() -> list[MemoryUse]:
    """Return the memory use of the host, and then of every visible device whose memory can be measured.

    The host always comes first, so a machine without accelerators gives one entry. Sizes are in bytes.
    """
    uses = [measure_host()]
    for hardware in HARDWARE.values():
        if hardware.kind != "cpu" and _is_counted(hardware):
            uses += [
                _measure_device(hardware, torch.device(hardware.kind, index))
                for index in range(hardware.count_devices())
            ]
    return uses


# ---------------------------------------------------------------- the host


def measure_host() -> MemoryUse:
    """Return the memory use of the host."""
    own = psutil.Process()
    info, machine = own.memory_info(), psutil.virtual_memory()
    total, occupied, source = machine.total, machine.total - machine.available, "psutil"
    limit, used = read_control_group()
    if limit is not None and limit < machine.total:
        total, occupied, source = limit or machine.total, used, "psutil and the control group's limit"
    processes = {own.pid: int(info.rss)}
    for child in own.children(recursive=True):
        try:
            processes[child.pid] = int(child.memory_info().rss)
        except psutil.Error:  # it has ended meanwhile
            continue
    return MemoryUse(
        device="cpu",
        used=int(info.rss),
        reserved=int(info.vms),
        peak=max(read_host_peak(), int(info.rss)),
        total=total,
        occupied=occupied,
        utilization=psutil.cpu_percent() / 100,
        processes=processes,
        source=source,
    )


def read_host_peak() -> int:
    """Return this process's peak resident memory in bytes.

    It is the peak since the kernel's counter was last reset, or since the start of the process.
    """
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
    return highest if sys.platform == "darwin" else highest * 1024  # macOS reports bytes, other systems KiB


def read_control_group(root: Path = Path("/")) -> tuple[int | None, int]:
    """Return the lowest memory limit of this process's control group and its parents, and the memory in use under it.

    Args:
        root: Folder that contains `proc` and `sys`.

    Returns:
        Pair of the limit in bytes (None without a limit) and the bytes in use under that limit (0 without a limit).
    """
    lowest: tuple[int | None, int] = (None, 0)
    for group in list_control_groups(root):
        limit = group.limit
        if limit is not None and (lowest[0] is None or limit < lowest[0]):
            lowest = limit, group.used or 0
    return lowest


# ---------------------------------------------------------------- devices


def _is_counted(hardware: Hardware) -> bool:
    """Whether torch counts the memory of tensors on this type of device."""
    names = ("memory_allocated", "current_allocated_memory")
    return any(hardware.find_memory_function(name) is not None for name in names)


def _measure_device(hardware: Hardware, device: torch.device) -> MemoryUse:
    """Return the memory use of one device.

    The second name of each query below is that of torch.mps, whose functions have other names than those of torch.cuda.

    Args:
        hardware: Device type.
        device: The device.
    """

    def read_allocator(name: str) -> int:
        function = hardware.find_memory_function(name)
        if function is None:
            return 0
        return int(function(device) if hardware.is_indexed else function())

    used = read_allocator("memory_allocated") or read_allocator("current_allocated_memory")
    reserved = max(read_allocator("memory_reserved") or read_allocator("driver_allocated_memory"), used)
    total, occupied = read_allocator("recommended_max_memory"), reserved
    report = read_driver_report(hardware, device)
    if report is not None:
        total, occupied = report.total, report.occupied
    elif hardware.find_memory_function("mem_get_info") is not None:
        free, total = read_device_memory(hardware, device)
        occupied = total - free
    return MemoryUse(
        device=str(device),
        used=used,
        reserved=reserved,
        peak=max(read_allocator("max_memory_allocated"), used),
        total=total,
        occupied=occupied,
        utilization=None if report is None else report.utilization,
        processes={os.getpid(): reserved} if report is None else report.processes,
        source=_describe_source(hardware, report is not None),
    )


def _describe_source(hardware: Hardware, has_report: bool) -> str:
    """Return the origin of a device's numbers as text.

    Args:
        hardware: Device type.
        has_report: Whether NVML has reported on the device.
    """
    if not _is_counted(hardware):
        return "the driver, by NVML" if has_report else f"none: torch does not count memory of {hardware.kind}"
    return "torch's allocator and NVML" if has_report else "torch's allocator"


# ---------------------------------------------------------------- free memory


def read_free_bytes(hardware: Hardware, device: torch.device) -> int:
    """Return the bytes that the driver can still give this process. Memory cached by torch's allocator is not included.

    If this process holds no memory on the device yet, NVML is queried if it is available, because it needs no context.
    The estimated size of a context is then subtracted.

    Args:
        hardware: Device type.
        device: The device, with its index if there are several.
    """
    reserved = _read_reserved(hardware, device)
    from_driver = None if reserved else read_memory_by_driver(hardware, device)
    if from_driver is None:
        free, _ = _query_runtime(hardware, device)
    else:
        free = from_driver[0] - CONTEXT_BYTES
    fraction = _read_memory_fraction(hardware, device)
    if fraction < 1:
        free = min(free, int(hardware.module.get_device_properties(device).total_memory * fraction) - reserved)
    return max(0, free)


def read_free_address_space() -> int | None:
    """Return the bytes that this process can still map before it reaches its address-space limit (`ulimit -v`).

    Return None if there is no limit, or if this is not Linux. Without a limit, the kernel kills a process when host
    memory runs out. Only with a limit does an allocation fail with an error.
    """
    if not sys.platform.startswith("linux"):
        return None
    resource: Any = importlib.import_module("resource")
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    mapped: int = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return max(0, int(limit) - mapped)


def read_host_memory() -> tuple[int, int]:
    """Return this process's resident memory and its mapped address space, in bytes. Linux only."""
    mapped_pages, resident_pages = Path("/proc/self/statm").read_text().split()[:2]
    resource: Any = importlib.import_module("resource")
    page_size: int = resource.getpagesize()
    return int(resident_pages) * page_size, int(mapped_pages) * page_size


def read_device_memory(hardware: Hardware, device: torch.device) -> tuple[int, int]:
    """Return a device's free and total bytes, which all processes on it share.

    CUDA's mem_get_info creates a context, which takes several hundred MB of the device until the process ends. If each
    of 8 ranks queried 8 GPUs, there would be 64 contexts. So if this process has no memory on the device, NVML is
    queried first, and CUDA only if NVML is not available.
    """
    from_driver = None if _read_reserved(hardware, device) else read_memory_by_driver(hardware, device)
    return _query_runtime(hardware, device) if from_driver is None else from_driver


def _read_reserved(hardware: Hardware, device: torch.device) -> int:
    """Return the bytes that torch's allocator has reserved on the device; 0 if the device has no such count."""
    read_reserved = hardware.find_memory_function("memory_reserved")
    return 0 if read_reserved is None else int(read_reserved(device))


def _read_memory_fraction(hardware: Hardware, device: torch.device) -> float:
    """Return the fraction of the device that this process may use (`set_per_process_memory_fraction`). Default: 1."""
    read_fraction = hardware.find_function("get_per_process_memory_fraction")
    return 1.0 if read_fraction is None else float(read_fraction(device))


def _query_runtime(hardware: Hardware, device: torch.device) -> tuple[int, int]:
    """Return a device's free and total bytes from the device's runtime, such as CUDA, which creates a context."""
    get_info = hardware.find_memory_function("mem_get_info")
    assert get_info is not None, "callers check that the device reports its memory"
    free, total = get_info(device)
    return int(free), int(total)
