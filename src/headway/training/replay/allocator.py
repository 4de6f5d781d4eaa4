"""How much memory a device has to spare, and whether its allocator thrashes; always "yes" and "no" on the CPU."""

import torch

from headway.memory.free import free_bytes
from headway.memory.peaks import PeakReader
from headway.runtime.device import Hardware

_EVERY = 8
"""Votes between two looks at the allocator's statistics, which take a tenth of a millisecond."""
_NUM_LOOKS = 2
"""Looks in a row that must have found the cache emptied: a shape that comes once, as in an evaluation, does it once."""


class AllocatorPressure:
    """Watches one device's allocator.

    Args:
        hardware: what kind of device.
        device: which one.
    """

    def __init__(self, hardware: Hardware, device: torch.device) -> None:
        self._hardware = hardware
        self._statistics = hardware.memory_ability("memory_stats")
        self._device = device
        names = ("memory_stats", "mem_get_info", "memory_reserved", "max_memory_allocated", "reset_peak_memory_stats")
        self._has_statistics = hardware.kind != "cpu" and all(
            hardware.memory_ability(name) is not None for name in names
        )
        self._peak = PeakReader(hardware, device) if self._has_statistics else None
        self._num_rescues: int | None = None
        self._num_in_a_row = 0
        self._num_votes = 0

    def start_over(self) -> None:
        """Pieces become smaller: what those of before took and did to the cache says nothing about these."""
        self._num_rescues, self._num_in_a_row, self._num_votes = None, 0, 0
        self.forget_peak()

    def forget_peak(self) -> None:
        """Whether there is room is next told by what is used from now on: an evaluation's peak, say, is not for ever."""
        if self._peak is not None:
            self._peak.reset()

    def has_room(self, factor: float) -> bool:
        """Would pieces `factor` times as large fit, by what was used at most since the peak was forgotten?"""
        if self._peak is None or self._statistics is None:
            return True
        statistics = self._statistics(self._device)
        base = statistics.get("allocated_bytes.all.current", 0)
        wanted = base + (self._peak.peak() - base) * factor
        free = free_bytes(self._hardware, self._device)
        return bool(wanted < free + statistics.get("reserved_bytes.all.current", 0))

    def is_thrashing(self) -> bool:
        """Does the allocator keep emptying its cache to get on? Asked at each vote, and looked into at some."""
        self._num_votes += 1
        if (
            self._peak is None
            or self._statistics is None
            or (self._num_rescues is not None and self._num_votes % _EVERY)
        ):
            return False
        statistics = self._statistics(self._device)
        # Each out-of-memory error was a retry too, one in vain: what is left are those that got on.
        now = statistics.get("num_alloc_retries", 0) - statistics.get("num_ooms", 0)
        before, self._num_rescues = self._num_rescues, now
        self._num_in_a_row = self._num_in_a_row + 1 if before is not None and now > before else 0
        return self._num_in_a_row >= _NUM_LOOKS
