"""Search for the largest batch size by predicting it from measurements at small sizes."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

_FIRST_SIZE = 2
"""First size to probe. Some layers, such as BatchNorm, cannot train on one sample."""

_MAX_GROWTH = 16
"""Maximum factor from one size to the next, unless no allowed size is in between.

If a larger size is predicted, a size in between is tried first.
"""

_MIN_TOLERANCE = 1 / 32
"""Fraction by which the result may be below the largest size that fits. Repeated measurements at one size differ by
about this fraction.
"""


class PredictedSize:
    """Search for the largest size by prediction: two small sizes are measured first, and then the predicted size.

    If a predicted size does not fit, slightly smaller sizes follow. All ranks must report equal values.

    Args:
        limit: Largest size to try.
        sizes: Allowed sizes in ascending order. Default: all sizes.
        tolerance: Fraction by which the result may be below the largest size that fits. It is at least 1/32.

    Attributes:
        size: Next size to try; 0 if no size is left below the last one that failed.
    """

    def __init__(self, limit: int, sizes: Sequence[int] | None = None, tolerance: float = 0.0) -> None:
        allowed: Sequence[int] = range(1, limit + 1) if sizes is None else sizes
        self._sizes = allowed[: bisect_right(allowed, limit)]
        self._tolerance = max(tolerance, _MIN_TOLERANCE)
        # Indices into `_sizes`: the largest size that fitted, the smallest that did not, and the next one to try.
        self._best_index = -1
        self._failed_index = len(self._sizes)
        self._index = min(bisect_left(self._sizes, _FIRST_SIZE), len(self._sizes) - 1)
        self._is_first_report = True
        self._num_failures = 0
        self._is_within_tolerance = False  # whether the next size would be hardly larger than the best one
        self.size = self._sizes[self._index]

    @property
    def best_size(self) -> int:
        """Largest size that has fitted so far, or 0 if none has."""
        return self._sizes[self._best_index] if self._best_index >= 0 else 0

    @property
    def is_done(self) -> bool:
        """Whether the search has ended.

        It has if each allowed size above `best_size` is known or predicted not to fit, or is within the tolerance.
        """
        return self._is_within_tolerance or self._best_index + 1 >= self._failed_index

    def move_to(self, size: int) -> None:
        """Try the largest allowed size up to `size` next, because all ranks have agreed on it."""
        self._index = max(0, bisect_right(self._sizes, size) - 1)
        self.size = self._sizes[self._index]

    def report(self, fits: bool, predicted: int | None = None) -> None:
        """Record whether the current size fits, and choose the next one.

        Args:
            fits: Whether the current size fits on all ranks.
            predicted: Largest size that is predicted to fit on all ranks. None: memory is not measured, or the current
                size does not fit.
        """
        if fits:
            self._best_index = self._index
        else:
            self._failed_index = self._index
            self._num_failures += 1
        if not self.is_done:
            self._index = self._choose_index(predicted)
        self._is_first_report = False
        fits_no_size = self.is_done and self._best_index < 0
        self.size = 0 if fits_no_size else self._sizes[self._index]

    def _choose_index(self, predicted: int | None) -> int:
        """Return the index of the next size to try. If it would be hardly larger than the best size, end the search.

        Args:
            predicted: Largest size that is predicted to fit on all ranks, or None if unknown.
        """
        if self._best_index < 0:  # nothing has fitted yet
            return max(0, bisect_right(self._sizes, self._sizes[self._failed_index] // 2) - 1)
        if self._is_first_report:  # the second small size
            return min(bisect_left(self._sizes, 2 * self.best_size), self._failed_index - 1)
        target = self._sizes[-1]
        if predicted is not None:
            next_size = self._sizes[self._best_index + 1]
            target = min(predicted, target, max(_MAX_GROWTH * self.best_size, next_size))
        if self._failed_index < len(self._sizes) and target >= self._sizes[self._failed_index]:
            # The prediction was too large, mostly by a little: go down in steps that double, at most to the middle.
            failed = self._sizes[self._failed_index]
            step = max(1, failed // 16) << (self._num_failures - 1)
            target = max((self.best_size + failed) // 2, failed - step)
        index = min(bisect_right(self._sizes, target), self._failed_index) - 1
        if self._sizes[index] <= self.best_size * (1 + self._tolerance):
            self._is_within_tolerance = True
            return self._best_index
        return index
