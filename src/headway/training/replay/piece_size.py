"""How many rows a piece of a batch may have: shrinks when memory runs out, grows back when there is room.

Every rank holds the same state, because it is only moved by what a vote has told all of them.

How much memory a device has to spare, and whether its allocator thrashes; always "yes" and "no" on the CPU.
"""

from dataclasses import dataclass

import torch

from headway.memory.monitor import PeakReader
from headway.memory.use import free_bytes
from headway.runtime.collectives.tree import slice_bounds
from headway.runtime.device import Hardware

FIRST_PATIENCE = 16
_MOST_PATIENCE = 4096


@dataclass
class PieceSize:
    """The largest piece, and what is known about larger ones.

    Growth tries a size after `patience` clean batches, where there is room for it by what these took at most: twice the
    present one, or halfway to what failed last, or that itself; where there is no room, it counts as failed, and something
    smaller is tried next. A try that fails goes back to the size before it and doubles the patience, so n batches see at
    most about log2(n / 16) failed tries, whatever memory does.

    Attributes:
        limit: rows; None: whole batches.
        failed: the smallest number of rows that failed, or had no room, since it was last tried.
        good: the limit before the try in progress.
        patience: clean batches before the next try.
        num_clean: since the last change.
    """

    limit: int | None = None
    failed: int | None = None
    good: int | None = None
    patience: int = FIRST_PATIENCE
    num_clean: int = 0

    def count(self, num_rows: int) -> int:
        """How many pieces a batch is cut into: as few as the limit allows."""
        return 1 if self.limit is None or num_rows <= self.limit else -(-num_rows // self.limit)

    def cuts(self, num_rows: int, least: int = 1) -> list[tuple[int, int]]:
        """Where the pieces of a batch begin and end, their sizes at most one apart.

        Args:
            num_rows: of the batch.
            least: pieces that it takes at least, where it has so many rows: another rank's batch needs them.
        """
        count = min(max(self.count(num_rows), least), max(num_rows, 1))
        return [slice_bounds(num_rows, count, index) for index in range(count)]

    def below(self, num_rows: int) -> int:
        """The size to go down to where pieces of `num_rows` rows failed; 0: there is none."""
        if self.good is not None and self.good < num_rows:
            return self.good
        return 0 if num_rows <= 1 else (num_rows + 1) // 2

    def go_on(self, **fields: int | None) -> None:
        """Be that of the run which is resumed, by its fields."""
        vars(self).update(fields)

    def shrink(self, limit: int, num_rows: int) -> None:
        """Pieces of `num_rows` rows failed; all ranks go on with `limit`."""
        if self.good is not None:
            self.patience = min(2 * self.patience, _MOST_PATIENCE)
        self.limit, self.failed, self.good, self.num_clean = limit, num_rows, None, 0

    def succeeded(self, num_rows: int, has_room: bool) -> None:
        """A batch whose largest piece had `num_rows` rows went through; `has_room`: all ranks have memory for `next_limit`."""
        # Even pieces have more than half of the limit's rows: shorter ones come from batches that it does not cut.
        if self.limit is None or 2 * num_rows <= self.limit:
            return
        self.num_clean += 1
        if self.num_clean < self.patience:
            return
        self.num_clean, larger = 0, self.next_limit()
        if not has_room:
            self.failed = larger
            return
        if self.failed is not None and larger >= self.failed:
            self.failed = None  # the room may have come back
        self.good, self.limit = self.limit, larger

    def next_limit(self) -> int:
        """The size that is tried next; meaningless for whole batches."""
        limit = self.limit or 1
        if self.failed is None or 2 * limit < self.failed:
            return 2 * limit
        middle = (limit + self.failed) // 2
        return middle if middle - limit > limit // 8 else max(self.failed, limit + 1)


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
        has_statistics = hardware.kind != "cpu" and all(hardware.memory_ability(name) is not None for name in names)
        self._peak = PeakReader(hardware, device) if has_statistics else None
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
