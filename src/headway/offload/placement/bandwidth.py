"""Bandwidth of this machine: how fast weights are read from memory, copied to an accelerator, and read from disk."""

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from headway.offload.placement.budget import available_memory
from headway.runtime.device import HARDWARE

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
    readers = [threading.Thread(target=_read, args=(pieces, lock, num_read, i), daemon=True) for i in range(_READERS)]
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


def _read(pieces: Iterator[tuple[Path, int]], lock: threading.Lock, num_read: list[int], index: int) -> None:
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
