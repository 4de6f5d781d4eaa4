"""How much memory a device has to spare, and whether its allocator thrashes; always "yes" and "no" on the CPU."""

import torch

from headway.runtime.device import Hardware

_EVERY = 8
"""Batches between two looks at the allocator's statistics, which take a tenth of a millisecond."""


class Headroom:
    """Watches one device's allocator.

    Args:
        hardware: what kind of device.
        device: which one.
    """

    def __init__(self, hardware: Hardware, device: torch.device) -> None:
        self._module = hardware.module
        self._device = device
        self._has_statistics = hardware.kind != "cpu" and all(
            hasattr(self._module, name) for name in ("memory_stats", "mem_get_info", "reset_peak_memory_stats")
        )
        self._num_retries = 0
        self._num_looks = 0

    def start_over(self) -> None:
        """Memory ran out: peaks of before say nothing about smaller pieces."""
        if self._has_statistics:
            self._module.reset_peak_memory_stats(self._device)

    def has_room(self, factor: float) -> bool:
        """Would pieces `factor` times as large fit, by what the present ones took at most?"""
        if not self._has_statistics:
            return True
        statistics = self._module.memory_stats(self._device)
        peak, base = (statistics.get(f"allocated_bytes.all.{name}", 0) for name in ("peak", "current"))
        free, _ = self._module.mem_get_info(self._device)
        wanted = base + (peak - base) * factor
        return bool(wanted < free + statistics.get("reserved_bytes.all.current", 0))

    def is_thrashing(self) -> bool:
        """Has the allocator had to empty its cache and ask again since the last look?"""
        self._num_looks += 1
        if not self._has_statistics or self._num_looks % _EVERY:
            return False
        before, self._num_retries = (
            self._num_retries,
            self._module.memory_stats(self._device).get("num_alloc_retries", 0),
        )
        return self._num_retries > before
