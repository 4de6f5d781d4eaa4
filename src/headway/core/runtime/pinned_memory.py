"""Pinned host memory for large copies, allocated in large pieces (arenas) by several threads.

`cudaHostAlloc` pins page by page, at about 2 GB/s, and blocks other calls to the device. In this module, an arena is
ordinary memory in huge pages. The allocating thread writes to it once, so that its pages exist, and then registers it
with the device in one call. Several arenas are prepared at the same time.
"""

import mmap
import os
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy
import torch

from headway.common import env
from headway.core.runtime.copy_stream import allocate_pinned
from headway.errors import UnsupportedError

MAX_ARENA_BYTES = 1 << 28
"""Maximum size of an arena in bytes, unless a single tensor is larger.

This size is small enough that several threads can share the work.
"""
_MIN_REGISTERED_BYTES = 1 << 25
"""Minimum size in bytes of a block that is registered with the device.

torch's allocator provides and caches smaller blocks.
"""
_MAX_THREADS = 8
_PORTABLE = 1
"""Flag of `cudaHostRegister`: the memory is pinned for all devices."""


def allocate_arena(num_bytes: int) -> torch.Tensor:
    """Allocate pinned host memory as a uint8 tensor.

    A large arena consists of huge pages that are registered with the calling thread's current device. Small arenas, and
    large ones that cannot be registered, come from torch's allocator.

    Args:
        num_bytes: Size in bytes.

    Raises:
        RuntimeError: If the system cannot provide the memory.
    """
    if num_bytes < _MIN_REGISTERED_BYTES or not torch.cuda.is_available() or not hasattr(mmap, "MADV_HUGEPAGE"):
        return allocate_pinned(num_bytes)
    try:
        return _allocate_registered(num_bytes)
    except (OSError, RuntimeError):  # out of memory, or the driver cannot register it: torch might still succeed
        return allocate_pinned(num_bytes)


def _allocate_registered(num_bytes: int) -> torch.Tensor:
    """Return pinned host memory as a uint8 tensor, made of huge pages that are registered with CUDA.

    Args:
        num_bytes: Size of the memory.

    Raises:
        UnsupportedError: If CUDA cannot register the memory.
    """
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    # After a fork, a write would move a page away from where the device expects it.
    mapping.madvise(mmap.MADV_DONTFORK)
    array = numpy.frombuffer(mapping, dtype=numpy.uint8)
    memory = torch.from_numpy(array)
    memory.zero_()  # the pages are created here, without a lock of the device's driver
    result = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, _PORTABLE)  # type: ignore[no-untyped-call]
    if int(result) != 0:
        raise UnsupportedError(f"cudaHostRegister failed with error {int(result)}")
    # The tensor keeps the array alive, and the array keeps the mapping, so unregistering precedes unmapping.
    weakref.finalize(array, _unregister_memory, memory.data_ptr()).atexit = False
    return memory


def _unregister_memory(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def start_allocations(
    sizes: Iterable[int], allocate: Callable[[int], torch.Tensor] = allocate_arena, max_threads: int = _MAX_THREADS
) -> list["Future[torch.Tensor]"]:
    """Start allocating arenas of pinned memory in several threads, and return one future per arena.

    Args:
        sizes: Sizes in bytes, in the order in which the arenas will be needed.
        allocate: Function that allocates one arena. Default: `allocate_arena`.
        max_threads: Maximum number of threads. Default: 8.
    """
    sizes = list(sizes)
    if not sizes:
        return []
    device_index = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
    executor = ThreadPoolExecutor(min(len(sizes), max_threads, choose_num_threads()), "headway-pin")
    futures = [executor.submit(_allocate_on, device_index, allocate, num_bytes) for num_bytes in sizes]
    executor.shutdown(wait=False)  # the threads end with the last arena
    return futures


def _allocate_on(device_index: int | None, allocate: Callable[[int], torch.Tensor], num_bytes: int) -> torch.Tensor:
    """Allocate memory on a new thread, after setting the thread's device.

    Args:
        device_index: Index of the device, or None if the device type has no index.
        allocate: Function that allocates a number of bytes.
        num_bytes: Number of bytes.
    """
    if device_index is not None:
        torch.accelerator.set_device_index(device_index)  # a new thread would create a context on device 0
    return allocate(num_bytes)


def choose_num_threads() -> int:
    """Return the number of threads that allocate arenas: this process's share of the machine's CPU cores, from 1 to 8."""
    return max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // max(1, env.get_local_world_size())))
