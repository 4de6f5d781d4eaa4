"""Simulated device memory with the counters of CUDA's caching allocator, for machines without a GPU.

Freed blocks are kept and reused for requests of the same size. If the device is full, the cache is emptied and the driver
is asked again: a retry. If this fails too, an out-of-memory error is raised, which counts as a retry as well
(CUDACachingAllocator.cpp, malloc: `alloc_block(params, true, ...)`, then `stats.num_ooms += 1`).
"""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch


class SimulatedAllocator:
    """Stand-in for `torch.cuda` with the memory functions that Headway calls.

    Args:
        capacity: Size of the device's memory in bytes.
        num_devices: Number of devices. The memory figures are those of the current one.
        current: Index of the current device.
        reuses_larger: Whether a larger cached block serves a smaller request. Otherwise, only a block of the same size does.

    Attributes:
        contexts: Devices on which the driver was asked, which opens a context there.
    """

    def __init__(self, capacity: int, num_devices: int = 1, current: int = 0, reuses_larger: bool = False) -> None:
        self.capacity, self.num_devices, self.current = capacity, num_devices, current
        self.used = self.highest = self.num_retries = self.num_ooms = self.num_resets = 0
        self.cached: Counter[int] = Counter()
        self.reuses_larger = reuses_larger
        self._larger: Counter[tuple[int, int]] = Counter()
        self.contexts: set[int] = set()

    def malloc(self, size: int) -> int:
        """Allocate a block and return its size, as the argument for `free`."""
        larger = [block for block, count in self.cached.items() if count and block > size and self.reuses_larger]
        if self.cached[size]:
            self.cached[size] -= 1
        elif larger:
            self.cached[min(larger)] -= 1
            self._larger[size, min(larger)] += 1
        elif self.reserved + size > self.capacity:
            self.num_retries += 1
            self.cached.clear()
            if self.used + size > self.capacity:
                self.num_ooms += 1
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
        self.used += size
        self.highest = max(self.highest, self.used)
        return size

    def free(self, size: int) -> None:
        """Put a block of this size into the cache."""
        self.used -= size
        block = next((block for (expected, block), count in self._larger.items() if count and expected == size), size)
        self._larger[size, block] -= block > size
        self.cached[block] += 1

    def use(self, size: int) -> None:
        """Allocate a block and free it again."""
        self.free(self.malloc(size))

    @property
    def reserved(self) -> int:
        """Bytes in use and in the cache."""
        rest = sum((block - size) * count for (size, block), count in self._larger.items())
        return self.used + rest + sum(size * count for size, count in self.cached.items())

    # ---------------------------------------------------------------- functions of torch.cuda

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return self.num_devices

    def current_device(self) -> int:
        return self.current

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": self.used, "allocated_bytes.all.peak": self.highest,
            "reserved_bytes.all.current": self.reserved, "num_alloc_retries": self.num_retries, "num_ooms": self.num_ooms,
        }  # fmt: skip

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        self.contexts.add(self._index(device))
        return self.capacity - self.reserved, self.capacity

    def memory_allocated(self, device: Any = None) -> int:
        return self.used if self._index(device) == self.current else 0

    def memory_reserved(self, device: Any = None) -> int:
        return self.reserved if self._index(device) == self.current else 0

    def get_device_properties(self, device: Any = None) -> Any:
        return SimpleNamespace(uuid=f"id-{self._index(device)}", total_memory=self.capacity)

    def _index(self, device: Any) -> int:
        index = device.index if isinstance(device, torch.device) else device
        return self.current if index is None else index

    def max_memory_allocated(self, device: Any = None) -> int:
        return self.highest

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self.num_resets += 1
        self.highest = self.used

    def empty_cache(self) -> None:
        self.cached.clear()
