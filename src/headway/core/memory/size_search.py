"""Searches for a batch size that fits into memory. They assume that memory grows with the batch size.

`FirstThatFits` goes down from the starting size. `LargestSize` finds the largest size that fits. `PredictedSize`
(`predicted_size.py`) predicts the largest size from short probes. The caller tries `size` and passes the result to
`report`::

    search = LargestSize(starting_size=128)
    while not search.is_done:
        search.report(fits=try_it(search.size))
    search.best_size            # 0 if nothing fits
"""

import inspect
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from inspect import Parameter
from typing import Any

from headway.core.memory.size_parameter import POSITIONAL_KINDS
from headway.errors import ConfigError

Reduce = Callable[..., int]
"""Function that returns the next size after a failure. Called with the size that failed, or without arguments if it
takes none.
"""

LARGEST = 65536
"""Default upper limit of the search for the largest size."""

_GROWTH = 8
"""Factor by which the steps of the search grow.

If the start is far from the result, growth by 8 takes two or three more attempts than doubling from the beginning. If
the start is close, it saves the attempts that bisection would need.
"""


class FirstThatFits:
    """Search downward from a starting size until one fits.

    Args:
        starting_size: First size to try.
        reduce: Function that returns the next size. Default: half, rounded down.
        sizes: Allowed sizes in ascending order. A size between two allowed sizes is rounded down. Default: all sizes.

    Attributes:
        size: Next size to try; 0 if no smaller size is left.
        best_size: Size that fitted; 0 until one has.

    Raises:
        ConfigError: From `report`, if `reduce` does not return a smaller integer.
    """

    def __init__(self, starting_size: int, reduce: Reduce | None = None, sizes: Sequence[int] | None = None) -> None:
        self.size = starting_size
        self.best_size = 0
        self._reduce = reduce
        self._sizes = sizes

    def move_to(self, size: int) -> None:
        """Try `size` next, because all ranks have agreed on it."""
        self.size = size

    def report(self, fits: bool) -> None:
        """Record whether the current size fits. If not, move to the next smaller one."""
        if fits:
            self.best_size = self.size
        else:
            self.size = self._round_to_allowed(self._reduce_size())

    @property
    def is_done(self) -> bool:
        """Whether a size has fitted, or no size is left to try."""
        return self.size in (0, self.best_size)

    def _reduce_size(self) -> int:
        """Return the size that follows the current one, before it is rounded to an allowed size.

        Raises:
            ConfigError: If the function `reduce` does not return a smaller integer.
        """
        if self._reduce is None:
            return self.size // 2
        reduced: Any = self._reduce(self.size) if _accepts_size(self._reduce) else self._reduce()
        if isinstance(reduced, bool) or not isinstance(reduced, int) or not reduced < self.size:
            raise ConfigError(
                f"reduce_batch_size_fn returned {reduced!r} after a batch size of {self.size} ran out of memory; it must return an "
                "integer below that, or 0 to give up"
            )
        return max(0, reduced)

    def _round_to_allowed(self, size: int) -> int:
        """Return the largest allowed size up to `size`, or 0 if there is none."""
        if self._sizes is None:
            return size
        index = bisect_right(self._sizes, size)
        return self._sizes[index - 1] if index else 0


class LargestSize:
    """Search for the largest size that fits.

    Each step away from the starting size is eight times the previous step, but at most doubles or halves the size. Once
    one size has fitted and a larger one has not, the search bisects. If the starting size is close to the result, for
    example because it comes from a memory forecast, the search takes 2 or 3 attempts. Otherwise it takes at most about
    2 log2(n) attempts for a result n.

    Args:
        starting_size: First size to try.
        limit: Largest size to try, at least `starting_size`.
        sizes: Allowed sizes in ascending order. The first size tried is the largest allowed one up to `starting_size`.
            Default: all sizes.
        tolerance: Fraction by which the result may be below the largest size that fits. 0: the result is exactly the
            largest size that fits.

    Attributes:
        size: Next size to try; 0 if no smaller size is left.
    """

    def __init__(
        self, starting_size: int, limit: int = LARGEST, sizes: Sequence[int] | None = None, tolerance: float = 0.0
    ) -> None:
        self._tolerance = tolerance
        allowed: Sequence[int] = range(1, limit + 1) if sizes is None else sizes
        self._sizes = allowed[: bisect_right(allowed, limit)]
        # Indices into `_sizes`: the largest size that fitted, the smallest that did not, and the next one to try.
        self._best_index = -1
        self._failed_index = len(self._sizes)
        self._index = max(0, bisect_right(self._sizes, starting_size) - 1)
        self._num_steps = 0  # steps away from the starting size so far
        self.size = self._sizes[self._index]

    @property
    def best_size(self) -> int:
        """Largest size that has fitted so far, or 0 if none has."""
        return self._sizes[self._best_index] if self._best_index >= 0 else 0

    @property
    def is_done(self) -> bool:
        """Whether the search has ended.

        The next larger size then does not fit, is not allowed, or is within the tolerance.
        """
        if self._best_index + 1 >= self._failed_index:
            return True
        is_bounded = self._best_index >= 0 and self._failed_index < len(self._sizes)
        return is_bounded and self._sizes[self._failed_index] <= self.best_size * (1 + self._tolerance)

    def move_to(self, size: int) -> None:
        """Try the largest allowed size up to `size` next, because all ranks have agreed on it."""
        self._index = max(0, bisect_right(self._sizes, size) - 1)
        self.size = self._sizes[self._index]

    def report(self, fits: bool) -> None:
        """Record whether the current size fits, and choose the next one."""
        if fits:
            self._best_index = self._index
        else:
            self._failed_index = self._index
        self._index = self._choose_index()
        fits_no_size = self.is_done and self._best_index < 0
        self.size = 0 if fits_no_size else self._sizes[self._index]

    def _choose_index(self) -> int:
        """Return the index of the next size to try, which is between the best and the failed size."""
        if self.is_done:
            return max(self._best_index, 0)
        if self._failed_index == len(self._sizes):  # nothing has failed yet: go up, at most to twice the size
            step = min(self._compute_next_step(self.best_size * self._tolerance), self.best_size)
            index = bisect_right(self._sizes, self.best_size + step) - 1
        elif self._best_index < 0:  # nothing has fitted yet: go down, at most to half the size
            failed = self._sizes[self._failed_index]
            first_step = failed * self._tolerance / (1 + self._tolerance)
            index = (
                bisect_right(self._sizes, failed - min(self._compute_next_step(first_step), failed - failed // 2)) - 1
            )
        else:  # bisect
            index = bisect_left(self._sizes, (self.best_size + self._sizes[self._failed_index]) // 2)
        return min(max(index, self._best_index + 1), self._failed_index - 1)

    def _compute_next_step(self, first_step: float) -> int:
        """Return the change in batch size for the next attempt, and count the step.

        Args:
            first_step: Size of the first step away from the starting size. Each later step is eight times the one
                before.
        """
        self._num_steps += 1
        return int(max(1, int(first_step)) * _GROWTH ** (self._num_steps - 1))


def _accepts_size(reduce: Reduce) -> bool:
    """Whether a function must be called with the size that failed, because it has a positional parameter for it."""
    try:
        parameters = inspect.signature(reduce).parameters.values()
    except ValueError:  # a callable of C without a signature
        return True
    return any(each.kind in POSITIONAL_KINDS and each.default is Parameter.empty for each in parameters)


def list_divisors(number: int) -> list[int]:
    """Return all divisors of a positive integer in ascending order."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def make_smaller_sizes(fitting_size: int) -> Reduce:
    """Return a function that reduces a size that fitted once and then failed.

    The first reduction is small, and each further one is twice the previous one.

    Args:
        fitting_size: Size that fitted once.
    """
    step = max(1, fitting_size // 32)

    def reduce_size(size: int) -> int:
        nonlocal step
        reduced = max(0, size - step)
        step *= 2
        return reduced

    return reduce_size
