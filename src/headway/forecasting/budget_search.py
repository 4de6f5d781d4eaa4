"""Search for the largest batch or the longest sequence that fits into a memory budget, from a few traces.

A trace takes seconds, but a replay of its allocations takes milliseconds. If the sequence of events does not depend on
the batch size, each event allocates or frees a + b * batch bytes. Two traces determine a and b for every event, so any
other batch size can be replayed without a trace. Two more traces then confirm the result of a search. A search for the
longest sequence needs three traces, because attention can keep memory that grows with the square of the length.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate, pairwise

from headway.common.garbage import pause_garbage_collection
from headway.forecasting.device.memory_events import MemoryEvent, StepMemory

DEFAULT_LIMIT = 1 << 20
"""Default upper limit of a search for the largest batch size or the longest sequence."""

PROBE = 8
"""First size that a search traces: a batch size, or a sequence length as a multiple of `LongestSequence.multiple`.

With smaller batches, a model can take other branches and use other kernels.
"""

_MAX_ROUNDS = 6
"""Maximum number of rounds in which a search traces other sizes, because the events of larger sizes differ."""

_SAMPLES = 16
"""Number of smaller sizes that are checked before a search returns a size.

The check is needed because fragmentation can make a smaller batch use more memory than a larger one.
"""


class SizedEvents:
    """Memory of a step for any size, interpolated from traces of a few sizes.

    A size is a batch size or a sequence length. The bytes of each event are a polynomial of the size, computed with
    Newton's forward differences. Two traces determine a polynomial of degree one, and three traces one of degree two.

    Args:
        traces: Memory of the traces at consecutive sizes, in ascending order of size. All traces must have the same
            sequence of events (see `is_same_sequence`), which is not checked here.
        first_size: Size of the first trace.
    """

    def __init__(self, traces: Sequence[StepMemory], first_size: int) -> None:
        self._first_size = first_size
        self._columns = list(zip(*traces[0].events))  # one tuple per field of `MemoryEvent`
        self._event_differences = _list_differences([[event.num_bytes for event in each.events] for each in traces])
        self._unsure_differences = _list_differences([[each.unsure_bytes] for each in traces])

    def compute_in_use(self, size: int) -> int:
        """Return the peak bytes of the tensors in use, and of memory that a run might need in addition."""
        return max(accumulate(self._interpolate(self._event_differences, size))) + self._compute_unsure(size)

    @pause_garbage_collection()
    def build_memory(self, size: int) -> StepMemory:
        """Return the memory of a step at a given batch size or sequence length."""
        keys, _, *other_fields = self._columns
        num_bytes = self._interpolate(self._event_differences, size)
        # Joined by columns instead of a Python loop over events, because a search builds the events of many sizes.
        events = list(map(MemoryEvent._make, zip(keys, num_bytes, *other_fields)))
        return StepMemory(events, self._compute_unsure(size))

    def _compute_unsure(self, size: int) -> int:
        """Return the uncertainty of the forecast for a batch size: bytes that a run might need beyond the events.

        The value is extrapolated from the traces.
        """
        return self._interpolate(self._unsure_differences, size)[0]

    def _interpolate(self, differences: list[list[int]], size: int) -> list[int]:
        """Return the values of polynomials at a size.

        Args:
            differences: Forward differences of the values at the first size, by order.
            size: Batch size or sequence length.
        """
        values, binomial = differences[0], 1
        for order, differences_of_order in enumerate(differences[1:]):
            binomial = binomial * (size - self._first_size - order) // (order + 1)
            values = [value + binomial * difference for value, difference in zip(values, differences_of_order)]
        return values


def _list_differences(rows: list[list[int]]) -> list[list[int]]:
    """Return the forward differences of several sequences at their first point. Item n has those of order n.

    Args:
        rows: Values of all sequences at each point.
    """
    differences: list[list[int]] = []
    while rows:
        differences.append(rows[0])
        rows = [[later - value for value, later in zip(row, next_row)] for row, next_row in pairwise(rows)]
    return differences


def is_same_sequence(first: StepMemory, second: StepMemory) -> bool:
    """Whether two traces allocate and free the same keys in the same order, by the same operations.

    The bytes of the events can differ, and so can their kinds, source lines and streams. If only one of the traces
    might need additional memory, the result is False.
    """
    if len(first.events) != len(second.events) or bool(first.unsure_bytes) != bool(second.unsure_bytes):
        return False
    return all(
        one.key == other.key and one.operation == other.operation and (one.num_bytes < 0) == (other.num_bytes < 0)
        for one, other in zip(first.events, second.events)
    )


class BudgetSearch:
    """Search for the largest batch, or the longest sequence, whose memory fits into a given number of bytes.

    A size is a batch size, or a sequence length as a multiple of `LongestSequence.multiple`.

    Args:
        trace_memory: Function that traces a step of a given size and returns its memory. Its results are cached.
        measure_peak: Function that returns the peak memory in bytes.
        capacity: Available bytes.
        limit: Largest size to try.
        degree: Degree of the polynomial that gives an event's bytes: 1 for batch sizes, 2 for sequence lengths, because
            of attention.
    """

    def __init__(
        self,
        trace_memory: Callable[[int], StepMemory],
        measure_peak: Callable[[StepMemory], int],
        capacity: int,
        limit: int = DEFAULT_LIMIT,
        degree: int = 1,
    ) -> None:
        self._trace_memory = cache(trace_memory)
        self._measure_peak = measure_peak
        self._capacity = capacity
        self._limit = limit
        self._degree = degree
        # By smallest traced size. None: the traces have different sequences of events.
        self._sized_events: dict[int, SizedEvents | None] = {}

    def find_largest(self) -> int:
        """Return the largest size whose step fits in memory, or 0 if not even size 1 fits.

        A size is a batch size, or a sequence length in units of `LongestSequence.multiple` tokens.

        Traces confirm that the returned size fits and that the next size does not. The next size is not traced if the
        returned size is the largest allowed one.
        """
        bound = self._limit
        sized_events = self._fit_events(PROBE) if PROBE + self._degree <= bound else None
        for _ in range(_MAX_ROUNDS):
            if sized_events is None:
                break
            size = self._lower_below_gaps(sized_events, self._bisect_interpolated(sized_events, bound))
            if size == 0:  # the interpolation is not exact for the smallest sizes, so trace them
                return self._bisect_size(self._can_fit, PROBE) if self._can_fit(1) else 0
            if self._can_fit(size):
                if size == bound or not self._can_fit(size + 1):
                    return size
                return self._bisect_size(self._can_fit, bound, fitting=size + 1)
            bound = size - 1
            # Large sizes have another sequence of events than small ones, so interpolate from traces near this size.
            sized_events = self._fit_events(max(1, size - self._degree))
        # No interpolation was possible or right, so trace a step of each size that the bisection tries.
        return self._bisect_size(self._can_fit, bound)

    def _fit_events(self, first_size: int) -> SizedEvents | None:
        """Return the bytes of each allocation event as a function of the size, or None if the traces differ.

        A size is a batch size or a sequence length. The function is fitted to traces at `first_size` and the one or
        two sizes after it. Traces differ if they have different sequences of events.

        Args:
            first_size: Smallest size to trace.
        """
        if first_size not in self._sized_events:
            traces = [self._trace_memory(first_size + step) for step in range(self._degree + 1)]
            first = traces[0]
            is_regular = first.events and all(is_same_sequence(first, trace) for trace in traces[1:])
            self._sized_events[first_size] = SizedEvents(traces, first_size) if is_regular else None
        return self._sized_events[first_size]

    def compute_curve(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Return pairs of (size, peak bytes). Sizes below `PROBE` are traced, and others extrapolated from a few traces.

        The list is empty if the traces to extrapolate from have different sequences of events.

        Args:
            sizes: Sizes to compute the memory for.
        """
        sized_events = self._fit_events(PROBE)
        if sized_events is None:
            return []
        curve: list[tuple[int, int]] = []
        for size in sizes:
            memory = self._trace_memory(size) if size < PROBE else sized_events.build_memory(size)
            curve.append((size, self._measure_peak(memory)))
        return curve

    def _bisect_interpolated(self, sized_events: SizedEvents, bound: int) -> int:
        """Return the largest size up to `bound` at which a step fits, according to its interpolated events.

        The total size of the tensors in use is quick to compute, and the allocator reserves only slightly more memory.
        So events are replayed only where this total is near the capacity.

        Args:
            sized_events: Interpolated events.
            bound: Largest size to consider.
        """

        def can_tensors_fit(size: int) -> bool:
            return sized_events.compute_in_use(size) <= self._capacity

        can_fit = partial(self._can_fit_interpolated, sized_events)
        upper_bound = self._bisect_size(can_tensors_fit, bound)
        likely_size = upper_bound - upper_bound // 8
        fitting = likely_size if likely_size and can_fit(likely_size) else 0
        return self._bisect_size(can_fit, upper_bound, fitting)

    def _can_fit_interpolated(self, sized_events: SizedEvents, size: int) -> bool:
        """Whether a step of a given size fits into the capacity, according to its interpolated events."""
        return self._measure_peak(sized_events.build_memory(size)) <= self._capacity

    def _lower_below_gaps(self, sized_events: SizedEvents, size: int) -> int:
        """Return `size`, or a smaller size if any sampled size between `size // 2` and `size` does not fit.

        Because of fragmentation, a smaller size sometimes needs more memory than a larger one. The result is below
        every sampled size that does not fit.

        Args:
            sized_events: Interpolated events.
            size: Size that fits.
        """
        stride = max(1, size // (2 * _SAMPLES))
        sampled = range(size - stride, size // 2, -stride)
        too_large = [sample for sample in sampled if not self._can_fit_interpolated(sized_events, sample)]
        return min(too_large) - 1 if too_large else size

    def _bisect_size(self, fits: Callable[[int], bool], limit: int, fitting: int = 0) -> int:
        """Return the largest size from `fitting` to `limit` for which `fits` returns True, found by bisection.

        The search assumes that `fitting` fits, and that every size below a fitting size also fits.

        Args:
            fits: Function that returns whether a size fits.
            limit: Largest size to try.
            fitting: Size that is known to fit. Default: 0.
        """
        low, high = fitting, max(1, fitting * 2)
        while high <= limit and fits(high):
            low, high = high, high * 2
        high = min(high, limit + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _can_fit(self, size: int) -> bool:
        """Whether a step of a given size fits into the capacity, according to a trace at exactly this size."""
        return self._measure_peak(self._trace_memory(size)) <= self._capacity
