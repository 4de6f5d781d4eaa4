"""Memory as a function of the number of rows, to predict the largest batch size that fits from measured sizes.

Memory is close to linear in rows: a constant part (weights, optimizer state, workspaces) and a part for each row. So
two measured sizes are enough to predict a larger one. A predicted size must be tried before it is used.
"""

from dataclasses import dataclass

_MAX_RATIO = 0.75
"""Maximum ratio of a smaller to a larger measured size for computing a slope from both.

The difference of closer sizes is mostly due to the allocator's rounding of block sizes.
"""

_MIN_SLOPE = 1 / 8
"""Lower limit of the estimated slope, as a fraction of the memory per row if no part of the memory were constant.

If the measured slope is lower, something else determines the peak (an optimizer step, a workspace), and larger
sizes will show a slope.
"""


@dataclass(frozen=True)
class RowPeak:
    """Peak memory in bytes, measured with a certain number of rows.

    Attributes:
        rows: Number of rows.
        allocated: Peak memory of tensors.
        reserved: Peak memory of the allocator, which also holds unused parts of its blocks.
    """

    rows: int
    allocated: float
    reserved: float

    @property
    def unused(self) -> float:
        """Bytes that the allocator holds at the peak, but that no tensor uses (fragmentation)."""
        return max(0.0, self.reserved - self.allocated)


class RowCurve:
    """Peak memory by number of rows, on one device of one rank.

    All peaks must be measured from the same base, such as the memory that is in use without a batch.
    """

    def __init__(self) -> None:
        self._peaks: dict[int, RowPeak] = {}

    def record_peak(self, peak: RowPeak) -> None:
        """Add a measurement. An earlier one with the same number of rows is replaced."""
        self._peaks[peak.rows] = peak

    def clear(self) -> None:
        """Forget all measurements."""
        self._peaks.clear()

    @property
    def unused(self) -> float:
        """Fragmentation in bytes at the largest measured size; 0 if nothing has been measured."""
        return self._peaks[max(self._peaks)].unused if self._peaks else 0.0

    def predict_largest(self, available: float) -> int | None:
        """Return the largest number of rows that is expected to fit, or None if nothing has been measured.

        With one measured size, all memory is assumed to be proportional to rows, which underestimates rather than
        overestimates the number. The prediction leaves a margin for the allocator's fragmentation. Fragmentation is
        measured at the largest size, and is assumed to grow in proportion to rows.

        Args:
            available: Bytes that are available in addition to the base from which peaks are measured.
        """
        if not self._peaks:
            return None
        largest = self._peaks[max(self._peaks)]
        bytes_per_row = self._estimate_slope(largest) + largest.unused / largest.rows
        remaining = available - largest.unused - largest.allocated
        if bytes_per_row <= 0:  # nothing was allocated at all
            return largest.rows
        return max(0, int(largest.rows + remaining // bytes_per_row))

    def _estimate_slope(self, largest: RowPeak) -> float:
        """Return the expected bytes per additional row, without fragmentation.

        It is the steepest slope between the largest measured size and a smaller one. Without a smaller one, all memory
        is assumed to be proportional to rows.

        Args:
            largest: Measurement at the largest size.
        """
        proportional_slope = largest.allocated / largest.rows
        slopes = [
            (largest.allocated - peak.allocated) / (largest.rows - rows)
            for rows, peak in self._peaks.items()
            if rows <= _MAX_RATIO * largest.rows
        ]
        return max(*slopes, proportional_slope * _MIN_SLOPE) if slopes else proportional_slope
