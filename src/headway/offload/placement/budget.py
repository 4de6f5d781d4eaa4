"""Budgets: how many bytes a model may take on each device of this machine, as measured or as the user says.

Bandwidth of this machine: how fast weights are read from memory, copied to an accelerator, and read from disk.
"""

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import torch

from headway.common import env
from headway.common.text import parse_bytes
from headway.errors import DeviceMapError, HeadwayError
from headway.launch.machine import control_groups
from headway.log import get_logger
from headway.memory.use import free_bytes
from headway.runtime import process
from headway.runtime.device import HARDWARE, Hardware, detect

logger = get_logger(__name__)

Device = int | str
"""An accelerator's index, or "cpu" or "disk"; "mps" and its like, of which a machine has one without an index, go by name."""

UNLIMITED = 1 << 62
OFFLOAD = ("cpu", "disk")


def get_max_memory(max_memory: Mapping[Device, int | str] | None = None) -> dict[Device, int]:
    """Bytes a model may take on each device, accelerators first, then "mps", "cpu" and "disk".

    Args:
        max_memory: {device: bytes or text such as "10GiB"}; a device is an index, "cuda:0", "cuda" (the one that this
            process computes on), "mps", "cpu" or "disk". None measures: what is free on each accelerator (with what torch's
            allocator holds unused), and what is available in main memory within the limits of the container. One for
            another machine may be planned with; that a device of it is not here is said once in the log.

    Raises:
        DeviceMapError: devices or sizes that are none, or a device with two budgets; all of them are named.
    """
    if max_memory is None:
        return _measured(detect())
    budgets = _read(max_memory)
    if absent := absent_from_here(budgets):
        logger.warning_once(f"{_said(absent, max_memory)}: a plan made with it is for another machine")
    return budgets


def check_presence(max_memory: Mapping[Device, int | str] | None) -> None:
    """See that each device of a budget is on this machine, where a model is about to be placed on them.

    Raises:
        DeviceMapError: devices or sizes that are none, or devices that are not here.
    """
    if max_memory is not None and (absent := absent_from_here(_read(max_memory))):
        raise DeviceMapError(
            f"{_said(absent, max_memory)}; name devices that are here, as in max_memory={{'cpu': '8GiB'}}, or leave it out"
        )


def absent_from_here(devices: Iterable[Device]) -> list[Device]:
    """Those of the devices that this machine does not have."""
    hardware = detect()
    count = 0 if hardware.kind == "cpu" else hardware.num_devices()
    return [
        device
        for device in dict.fromkeys(devices)
        if (device >= count if isinstance(device, int) else device not in (*OFFLOAD, hardware.kind))
    ]


def devices_here() -> str:
    """The accelerators of this machine, in words."""
    hardware = detect()
    if not hardware.is_indexed:
        return "the CPU alone" if hardware.kind == "cpu" else hardware.kind
    count = hardware.num_devices()
    return f"{hardware.kind} 0" if count == 1 else f"{hardware.kind} 0 to {count - 1}"


def _said(absent: Sequence[Device], max_memory: Mapping[Device, int | str]) -> str:
    given = ", ".join(f"{key!r}: {size!r}" for key, size in max_memory.items())
    return f"max_memory={{{given}}} names {', '.join(map(str, absent))}, and this machine has {devices_here()}"


def _read(max_memory: Mapping[Device, int | str]) -> dict[Device, int]:
    budgets: dict[Device, int] = {}
    faults: list[str] = []
    for key, size in max_memory.items():
        try:
            device = as_device(key)
            if device in budgets:
                raise DeviceMapError(f"device {device} already has a budget under another name; give it only one")
            budgets[device] = parse_bytes(int(size) if isinstance(size, float) else size)
        except HeadwayError as error:
            faults.append(f"{key!r}: {error}")
    if faults:
        raise DeviceMapError("max_memory does not hold: " + "; ".join(faults))
    return {device: budgets[device] for device in sorted(budgets, key=rank_of)}


def rank_of(device: Device) -> tuple[int, int]:
    """The order in which devices are filled: accelerators by index, then one without an index, cpu, disk."""
    return (0, device) if isinstance(device, int) else (1, 1 + OFFLOAD.index(device) if device in OFFLOAD else 0)


def is_accelerator(device: Device) -> bool:
    """Does this device compute, other than the CPU?"""
    return device not in OFFLOAD


def as_device(device: object) -> Device:
    """Read an index, `"1"`, `"cuda:1"`, `"cuda"` (this process's own), torch.device(...), "mps", "cpu" or "disk".

    Raises:
        DeviceMapError: it is none of these, or "meta", where no values are.
    """
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return device
    if device == "disk":
        return "disk"
    if isinstance(device, str) and device.isdecimal():
        return int(device)
    if isinstance(device, (str, torch.device)):
        try:
            found = torch.device(device)
        except RuntimeError:
            found = None
        if found is not None and found.type == "meta":
            raise DeviceMapError("'meta' holds no values; give 'cpu', 'disk' or an accelerator")
        if found is not None:
            known = HARDWARE.get(found.type)
            if known is not None and not known.is_indexed:
                return found.type
            return _own_index(found.type) if found.index is None else found.index
    raise DeviceMapError(
        f"{device!r} is not a device; give an accelerator's index (0, 1, ...), 'cuda:0', 'mps', 'cpu' or 'disk'"
    )


def _own_index(kind: str) -> int:
    """Which device of the kind this process computes on, or will by its local rank; 0 where the machine has none."""
    if process.is_started():
        own = process.current().device
        return own.index or 0 if own.type == kind else 0
    hardware = HARDWARE.get(kind)
    if hardware is None or not hardware.is_available():
        return 0
    is_in_use, current = map(hardware.ability, ("is_initialized", "current_device"))
    chosen = current() if current is not None and is_in_use is not None and is_in_use() else 0
    return int(chosen) or (env.local_rank() if env.local_rank() < hardware.num_devices() else 0)


def _measured(hardware: Hardware) -> dict[Device, int]:
    free: dict[Device, int] = {}
    if hardware.kind != "cpu" and not hardware.is_indexed:
        return {hardware.kind: available_memory()}
    if hardware.memory_ability("mem_get_info") is None and hardware.kind != "cpu":
        logger.warning_once(
            f"{hardware.kind} devices do not report how much memory is free, so no part of a model is placed on them; say what each "
            f"may take, such as max_memory={{0: '8GiB', 'cpu': '16GiB'}}"
        )
        return {"cpu": available_memory()}
    shares_main_memory = False
    for index in range(hardware.num_devices() if hardware.kind != "cpu" else 0):
        try:
            free[index] = _free_on(hardware, index)
        except RuntimeError as error:
            logger.warning(f"{hardware.kind}:{index} does not answer and is left out: {error}")
            continue
        describe = hardware.ability("get_device_properties")
        shares_main_memory |= describe is not None and bool(getattr(describe(index), "is_integrated", False))
    if not shares_main_memory:
        free["cpu"] = available_memory()
    return free


def _free_on(hardware: Hardware, index: int) -> int:
    device = torch.device(hardware.kind, index)
    held, used = map(hardware.memory_ability, ("memory_reserved", "memory_allocated"))
    cached = 0 if held is None or used is None else int(held(device)) - int(used(device))
    return free_bytes(hardware, device) + max(0, cached)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of main memory that this process may still take, within the machine's and its container's limits.

    Args:
        root: where `proc` and `sys` lie, for the limits.
    """
    rooms = [room for group in control_groups(root) if (room := group.room) is not None]
    return min([int(psutil.virtual_memory().available), *rooms])


_MOST = 256 << 20
_COLUMNS = 4096
_PIECE = 8 << 20
_READERS = 4


def memory_bandwidth(device: torch.device, num_repeats: int = 5) -> float:
    """Bytes a second at which a matrix is read by its product with a vector, which is what generating a token does.

    The best of several: a ceiling is asked for, and other work on the machine only makes it slower.

    Args:
        device: whose memory is read, by itself.
        num_repeats: readings after the first.
    """
    size = min(_MOST, available_memory() // 4) if device.type == "cpu" else _MOST
    matrix = torch.ones(max(1, size // (4 * _COLUMNS)), _COLUMNS, device=device)
    vector = torch.ones(_COLUMNS, device=device)
    return matrix.nbytes / _fastest(lambda: matrix @ vector, device, num_repeats)


def copy_bandwidth(device: torch.device, num_repeats: int = 5) -> float:
    """Bytes a second that pinned main memory is copied at to an accelerator."""
    is_pinned = device.type != "cpu" and HARDWARE[device.type].can_pin
    source = torch.ones(min(_MOST, available_memory() // 4), dtype=torch.uint8, pin_memory=is_pinned)
    target = torch.empty_like(source, device=device)
    return source.nbytes / _fastest(lambda: target.copy_(source, non_blocking=True), device, num_repeats)


def disk_bandwidth(files: Iterable[Path], most: int = _MOST) -> float | None:
    """Bytes a second that the files' disk gives, past the page cache, to four readers at once.

    Args:
        files: what to read of, in turn.
        most: bytes to read.

    Returns:
        None where the file system knows no reading past the page cache, or all files together are less than 8 MiB.
    """
    pieces = iter(list(_pieces(files, most)))
    lock, num_read = threading.Lock(), [0] * _READERS
    readers = [
        threading.Thread(target=_read_pieces, args=(pieces, lock, num_read, i), daemon=True) for i in range(_READERS)
    ]
    start = time.perf_counter()
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return sum(num_read) / (time.perf_counter() - start) if sum(num_read) else None


def _fastest(work: Callable[[], object], device: torch.device, num_repeats: int) -> float:
    taken = []
    for _ in range(num_repeats + 1):
        start = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        taken.append(time.perf_counter() - start)
    return min(taken)


def _pieces(files: Iterable[Path], most: int) -> Iterator[tuple[Path, int]]:
    """Whole pieces of the files, as (file, offset)."""
    for file in files:
        for offset in range(0, file.stat().st_size - _PIECE + 1, _PIECE):
            most -= _PIECE
            if most < 0:
                return
            yield file, offset


def _read_pieces(pieces: Iterator[tuple[Path, int]], lock: threading.Lock, num_read: list[int], index: int) -> None:
    # Reading past the cache needs memory that begins at a page; an anonymous mapping does.
    with mmap.mmap(-1, _PIECE) as room:
        while True:
            with lock:
                piece = next(pieces, None)
            if piece is None:
                return
            try:
                opened = os.open(piece[0], os.O_RDONLY | os.O_DIRECT)
            except (OSError, AttributeError):
                return  # a file system in memory, or a system without the flag: nothing is counted
            try:
                num_read[index] += os.preadv(opened, [room], piece[1])
            except OSError:
                return
            finally:
                os.close(opened)
