"""A caching allocator as CUDA's counts, in place of one: this machine has no device whose allocator could be asked.

Blocks are kept when they are freed and given out again to requests of their own size. Where the device is full, the cache is
emptied and the driver asked again: a retry. Where that fails too it is an out-of-memory error, which has been a retry as
well (CUDACachingAllocator.cpp, malloc: `alloc_block(params, true, ...)`, then `stats.num_ooms += 1`).
"""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch


class SimulatedAllocator:
    """What Headway asks of torch.cuda, over numbers.

    Args:
        capacity: bytes of the device.
        num_devices: how many there are; the numbers are those of the current one.
        current: the current device.
        reuses_larger: whether a larger cached block serves a smaller request. Otherwise only a block of its own size does.

    Attributes:
        contexts: the devices on which the driver was asked, which opens a context there.
    """

    def __init__(self, capacity: int, num_devices: int = 1, current: int = 0, reuses_larger: bool = False) -> None:
        self.capacity, self.num_devices, self.current = capacity, num_devices, current
        self.used = self.highest = self.num_retries = self.num_ooms = self.num_resets = 0
        self.cached: Counter[int] = Counter()
        self.reuses_larger = reuses_larger
        self._larger: Counter[tuple[int, int]] = Counter()
        self.contexts: set[int] = set()

    def malloc(self, size: int) -> int:
        """Take `size` bytes; returns them for `free`."""
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
        """Put a block into the cache."""
        self.used -= size
        block = next((block for (wanted, block), count in self._larger.items() if count and wanted == size), size)
        self._larger[size, block] -= block > size
        self.cached[block] += 1

    def use(self, size: int) -> None:
        """Take and give back."""
        self.free(self.malloc(size))

    @property
    def reserved(self) -> int:
        """In use and in the cache."""
        rest = sum((block - size) * count for (size, block), count in self._larger.items())
        return self.used + rest + sum(size * count for size, count in self.cached.items())

    # ---------------------------------------------------------------- as torch.cuda has it

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
