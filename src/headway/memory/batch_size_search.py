"""Which batch size to try next: pure search over sizes, downwards only, or for the largest that fits. Torch-free.

Both searches assume that memory grows with the size. They are asked for `size`, and told by `report` whether it fitted::

    search = LargestSize(starting_size=128)
    while not search.is_done:
        search.report(fits=try_it(search.size))
    search.found            # 0 where nothing fitted
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from typing import Any, Protocol

from headway.errors import ConfigError

Reduce = Callable[..., int]
"""What gives the next size after a failure: called with the size that failed, or with nothing where it takes nothing."""

LARGEST = 65536
"""The size up to which the search for the largest one grows, where no other limit is given."""

_GROWTH = 8
"""A start that is off costs two or three tries more than doubling at once; one that is near saves as many as bisecting takes."""


class BatchSizeSearch(Protocol):
    """A search in progress.

    Attributes:
        size: what to try next; 0 where nothing is left below the last failure.
        found: the largest size that fitted; 0 while none did.
        is_done: nothing remains to be tried.
    """

    size: int

    @property
    def found(self) -> int: ...

    @property
    def is_done(self) -> bool: ...

    def report(self, fits: bool) -> None:
        """Say whether `size` fitted, which moves the search on."""


class FirstThatFits:
    """From a size downwards until one fits.

    Args:
        starting_size: the first one.
        reduce: gives the next one; None: half of it.
        sizes: the only sizes allowed, ascending; None: all. A size between two of them becomes the lower one.

    Raises:
        ConfigError: a starting size below 1, or (from `report`) a reduced size that is not a smaller integer.
    """

    def __init__(self, starting_size: int, reduce: Reduce | None = None, sizes: Sequence[int] | None = None) -> None:
        self.size = check_size(starting_size, "starting_batch_size")
        self.found = 0
        self._reduce = reduce
        self._sizes = sizes

    def report(self, fits: bool) -> None:
        """Stop at a size that fitted; else make the next one smaller."""
        if fits:
            self.found = self.size
        else:
            self.size = self._fitted_in(self._next())

    @property
    def is_done(self) -> bool:
        """Did a size fit, or is none left?"""
        return self.size in (0, self.found)

    def _next(self) -> int:
        if self._reduce is None:
            return self.size // 2
        reduced: Any = self._reduce(self.size) if _takes_the_size(self._reduce) else self._reduce()
        if isinstance(reduced, bool) or not isinstance(reduced, int) or not reduced < self.size:
            raise ConfigError(
                f"reduce_batch_size_fn returned {reduced!r} after a batch size of {self.size} ran out of memory; it must return an "
                "integer below that, or 0 to give up"
            )
        return max(0, reduced)

    def _fitted_in(self, size: int) -> int:
        if self._sizes is None:
            return size
        index = bisect_right(self._sizes, size)
        return self._sizes[index - 1] if index else 0


class LargestSize:
    """The largest size that fits, by steps away from the start that grow eightfold up to doubling and halving, then by bisection.

    A start that is near the answer, as one that was forecast, takes 2 to 3 tries; from anywhere else there are at most about
    2 log2(n) for an answer of n.

    Args:
        starting_size: the first one to try.
        limit: the largest one to try.
        sizes: the only sizes allowed, ascending; None: all. The first one is the largest of them up to `starting_size`.
        tolerance: the answer may be below the largest size that fits by this share of itself; 0: it is that one.

    Raises:
        ConfigError: a size below 1, a limit below the start, or a tolerance that is not in [0, 1).
    """

    def __init__(
        self, starting_size: int, limit: int = LARGEST, sizes: Sequence[int] | None = None, tolerance: float = 0.0
    ) -> None:
        start = check_size(starting_size, "starting_batch_size")
        if check_size(limit, "max_batch_size") < start:
            raise ConfigError(f"max_batch_size={limit} is below starting_batch_size={start}; raise it, or start lower")
        self._tolerance = check_tolerance(tolerance)
        allowed: Sequence[int] = range(1, limit + 1) if sizes is None else sizes
        # Everything below is about positions in the allowed sizes: the last that fitted, the first that did not.
        self._sizes = allowed[: bisect_right(allowed, limit)]
        self._fits = -1
        self._fails = len(self._sizes)
        self._at = max(0, bisect_right(self._sizes, start) - 1)
        self._num_steps = 0
        self.size = self._sizes[self._at]

    @property
    def found(self) -> int:
        """The largest size that fitted; 0 while none did."""
        return self._sizes[self._fits] if self._fits >= 0 else 0

    @property
    def is_done(self) -> bool:
        """Is the next larger size known not to fit, or not allowed, or near enough?"""
        if self._fits + 1 >= self._fails:
            return True
        is_bounded = self._fits >= 0 and self._fails < len(self._sizes)
        return is_bounded and self._sizes[self._fails] <= self.found * (1 + self._tolerance)

    def report(self, fits: bool) -> None:
        """Close in from below or from above."""
        if fits:
            self._fits = self._at
        else:
            self._fails = self._at
        self._at = self._choose()
        self.size = 0 if self.is_done and self._fits < 0 else self._sizes[min(self._at, len(self._sizes) - 1)]

    def _choose(self) -> int:
        if self.is_done:
            return max(self._fits, 0)
        if self._fails == len(self._sizes):  # nothing has failed yet: go up
            step = min(self._step(self.found * self._tolerance), self.found)
            return min(max(bisect_right(self._sizes, self.found + step) - 1, self._fits + 1), self._fails - 1)
        if self._fits < 0:  # nothing has fitted yet: go down
            failed = self._sizes[self._fails]
            step = min(self._step(failed * self._tolerance / (1 + self._tolerance)), failed - failed // 2)
            return min(max(bisect_right(self._sizes, failed - step) - 1, 0), self._fails - 1)
        middle = bisect_left(self._sizes, (self.found + self._sizes[self._fails]) // 2)
        return min(max(middle, self._fits + 1), self._fails - 1)

    def _step(self, first: float) -> int:
        """The next step, where the first one was so long."""
        self._num_steps += 1
        return int(max(1, int(first)) * _GROWTH ** (self._num_steps - 1))


def divisors(number: int) -> list[int]:
    """All divisors of a number from 1 on, ascending."""
    low = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*low, *(number // each for each in low)})


def check_size(value: Any, name: str) -> int:
    """The value, which must be an integer from 1 on.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r}; give the number of samples in a batch, an integer from 1 on")
    return value


def check_tolerance(value: Any) -> float:
    """The value, which must be a share below 1.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigError(
            f"tolerance={value!r}; give how far below the largest size the answer may be, as a share of it, such as 0.05, or 0"
        )
    return float(value)


def _takes_the_size(reduce: Reduce) -> bool:
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.VAR_POSITIONAL)
    try:
        parameters = signature(reduce).parameters.values()
    except ValueError:  # a callable of C without a signature
        return True
    return any(each.kind in kinds and each.default is Parameter.empty for each in parameters)
