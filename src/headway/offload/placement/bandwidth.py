"""Measure this machine's bandwidths: reading memory, copying to an accelerator, and reading from disk."""

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from headway.core.runtime.device import HARDWARE
from headway.offload.placement.budget import measure_available_memory

_MOST = 256 << 20
"""Maximum number of bytes that one bandwidth measurement reads."""
_COLUMNS = 4096
"""Number of columns of the measured matrix."""
_PIECE = 8 << 20
"""Bytes per read of the disk measurement."""
_READERS = 4
"""Number of threads that read from the disk."""


def measure_memory_bandwidth(device: torch.device, num_repeats: int = 5) -> float:
    """Measure a device's memory bandwidth in bytes per second, with a matrix-vector product as in token generation.

    The fastest of several measurements is used, because other work on the machine only slows measurements down.

    Args:
        device: Device that computes the product, and whose memory is measured.
        num_repeats: Number of measurements after the first. Default: 5.
    """
    size = min(_MOST, measure_available_memory() // 4) if device.type == "cpu" else _MOST
    matrix = torch.ones(max(1, size // (4 * _COLUMNS)), _COLUMNS, device=device)
    vector = torch.ones(_COLUMNS, device=device)
    return matrix.nbytes / _time_fastest(lambda: matrix @ vector, device, num_repeats)


def measure_copy_bandwidth(device: torch.device, num_repeats: int = 5) -> float:
    """Measure the bandwidth of copies from main memory to an accelerator, in bytes per second.

    Main memory is pinned if the accelerator supports that.

    Args:
        device: Accelerator to copy to.
        num_repeats: Number of measurements after the first. Default: 5.
    """
    is_pinned = device.type != "cpu" and HARDWARE[device.type].can_pin
    source = torch.ones(min(_MOST, measure_available_memory() // 4), dtype=torch.uint8, pin_memory=is_pinned)
    target = torch.empty_like(source, device=device)
    return source.nbytes / _time_fastest(lambda: target.copy_(source, non_blocking=True), device, num_repeats)


def measure_disk_bandwidth(files: Iterable[Path], most: int = _MOST) -> float | None:
    """Measure the bandwidth in bytes per second at which four threads read files from disk, without the page cache.

    Args:
        files: Files to read, in order.
        most: Maximum number of bytes to read. Default: `_MOST`.

    Returns:
        The bandwidth. None if the file system cannot bypass the page cache, or if no file has at least 8 MiB.
    """
    pieces = iter(list(_list_pieces(files, most)))
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


def _time_fastest(work: Callable[[], object], device: torch.device, num_repeats: int) -> float:
    """Return the duration of the fastest of several calls, in seconds.

    Args:
        work: Function to call.
        device: Device whose work is awaited after each call.
        num_repeats: Number of calls after the first.
    """
    durations = []
    for _ in range(num_repeats + 1):
        start = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        durations.append(time.perf_counter() - start)
    return min(durations)


def _list_pieces(files: Iterable[Path], most: int) -> Iterator[tuple[Path, int]]:
    """Yield the file and offset of each complete block of `_PIECE` bytes (8 MiB), up to `most` bytes in total."""
    for file in files:
        for offset in range(0, file.stat().st_size - _PIECE + 1, _PIECE):
            most -= _PIECE
            if most < 0:
                return
            yield file, offset


def _read_pieces(pieces: Iterator[tuple[Path, int]], lock: threading.Lock, num_read: list[int], index: int) -> None:
    """Read blocks of files without the page cache until none is left. Runs in a thread.

    Args:
        pieces: Iterator over the file and offset of each block, which several threads share.
        lock: Lock for the iterator.
        num_read: Number of bytes that each thread has read. The thread's own entry is increased.
        index: Index of this thread.
    """
    # A read that bypasses the page cache needs page-aligned memory, such as an anonymous mapping.
    with mmap.mmap(-1, _PIECE) as buffer:
        while True:
            with lock:
                piece = next(pieces, None)
            if piece is None:
                return
            file, offset = piece
            try:
                descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
            except (OSError, AttributeError):
                return  # a file system in memory, or an operating system without O_DIRECT, cannot be measured
            try:
                num_read[index] += os.preadv(descriptor, [buffer], offset)
            except OSError:
                return
            finally:
                os.close(descriptor)
