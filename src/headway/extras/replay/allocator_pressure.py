"""Monitor a device's memory allocator: predict how many rows of a batch fit, and detect whether the allocator thrashes.

On the CPU, sizes are not predicted and thrashing is not detected.
"""

import torch

from headway.core.memory.monitor import PeakReader
from headway.core.memory.row_curve import RowCurve, RowPeak
from headway.core.memory.use import read_free_bytes
from headway.core.runtime.device import Hardware

_VOTES_PER_QUERY = 8
"""Number of calls of `AllocatorPressure.is_thrashing` per query of the allocator's statistics.

A query takes a tenth of a millisecond.
"""

_NUM_QUERIES = 2
"""Number of consecutive queries that must find that the cache was emptied before the allocator counts as thrashing.

A tensor shape that occurs only once, for example in an evaluation, can make the allocator empty its cache once.
"""


class AllocatorPressure:
    """Monitor of one device's memory allocator. It predicts how many rows fit, and detects thrashing.

    Args:
        hardware: Functions of the device type, such as its memory statistics.
        device: Device to monitor.
    """

    def __init__(self, hardware: Hardware, device: torch.device) -> None:
        self._hardware = hardware
        self._statistics = hardware.find_memory_function("memory_stats")
        self._device = device
        names = ("memory_stats", "mem_get_info", "memory_reserved", "max_memory_allocated", "reset_peak_memory_stats")
        has_statistics = hardware.kind != "cpu" and all(
            hardware.find_memory_function(name) is not None for name in names
        )
        self._peak = PeakReader(hardware, device) if has_statistics else None
        # Measurements of micro-batches
        self._curve = RowCurve()
        self._piece_peaks: dict[int, int] = {}  # peak bytes by number of rows, during a calibration
        self._reserved_bytes = 0  # largest size of the allocator's cache during a calibration
        # Detection of thrashing
        self._num_retries: int | None = None  # as of the last query
        self._num_thrashing_queries = 0  # in a row
        self._num_votes = 0

    @property
    def is_measured(self) -> bool:
        """Whether the allocator counts memory, so that sizes can be predicted."""
        return self._peak is not None

    def reset_statistics(self) -> None:
        """Reset all statistics when micro-batches become smaller, because earlier values no longer apply."""
        self._num_retries, self._num_thrashing_queries, self._num_votes = None, 0, 0
        self._curve.clear()
        self.reset_peak()

    def reset_peak(self) -> None:
        """Reset the peak memory, so that an evaluation's earlier peak does not count for later micro-batches."""
        self._piece_peaks.clear()
        self._reserved_bytes = 0
        if self._peak is not None:
            self._peak.reset()

    def release_cache(self) -> None:
        """Return cached blocks to the driver, because the size of micro-batches changes.

        Otherwise, the old blocks would be too small for larger micro-batches and would look like fragmentation.
        """
        if self._peak is not None:
            self._hardware.release_cache()

    def record_piece(self, num_rows: int) -> None:
        """Record the peak memory since the last micro-batch, and start to measure the next one.

        Args:
            num_rows: Rows of the micro-batch that has ended. 0: do not record its peak.
        """
        if self._peak is None or self._statistics is None:
            return
        if num_rows:
            self._piece_peaks[num_rows] = max(self._piece_peaks.get(num_rows, 0), self._peak.read_peak())
            self._reserved_bytes = max(
                self._reserved_bytes, self._statistics(self._device).get("reserved_bytes.all.current", 0)
            )
        self._peak.reset()

    def predict_rows(self, num_rows: int) -> int:
        """Return the largest number of rows per micro-batch that is expected to fit on this rank.

        Return -1 if the device's memory is not measured, and 0 if not even one row is expected to fit.

        Args:
            num_rows: Rows of the largest micro-batch since `reset_peak` was last called.
        """
        if self._peak is None or self._statistics is None:
            return -1
        statistics = self._statistics(self._device)
        # Gradients and optimizer state exist at this point; activations do not.
        base_bytes = statistics.get("allocated_bytes.all.current", 0)
        reserved_bytes = statistics.get("reserved_bytes.all.current", 0)
        if self._piece_peaks:
            peaks = self._piece_peaks
            unused_bytes = max(self._reserved_bytes, reserved_bytes) - max(peaks.values())
        else:
            # Outside of a calibration, the cache also holds blocks of other work, such as an evaluation.
            peaks = {num_rows: self._peak.read_peak()}
            unused_bytes = self._curve.unused
        for rows, peak_bytes in peaks.items():
            allocated_bytes = max(peak_bytes - base_bytes, 0)
            self._curve.record_peak(RowPeak(rows, allocated_bytes, allocated_bytes + max(unused_bytes, 0)))
        available_bytes = read_free_bytes(self._hardware, self._device) + reserved_bytes - base_bytes
        return self._curve.predict_largest(available_bytes) or 0

    def is_thrashing(self) -> bool:
        """Whether the allocator repeatedly has to empty its cache to satisfy requests.

        Called once per vote, in which the ranks report whether their batch has succeeded. Only some of these calls
        read the allocator's statistics; the others return False.
        """
        self._num_votes += 1
        if self._peak is None or self._statistics is None:
            return False
        if self._num_retries is not None and self._num_votes % _VOTES_PER_QUERY:
            return False
        statistics = self._statistics(self._device)
        # Each out-of-memory error also counts as a retry, so subtract them to get the successful retries.
        num_retries = statistics.get("num_alloc_retries", 0) - statistics.get("num_ooms", 0)
        old_num_retries, self._num_retries = self._num_retries, num_retries
        if old_num_retries is not None and num_retries > old_num_retries:
            self._num_thrashing_queries += 1
        else:
            self._num_thrashing_queries = 0
        return self._num_thrashing_queries >= _NUM_QUERIES
