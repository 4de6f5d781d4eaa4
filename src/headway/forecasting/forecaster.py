"""Forecast a training step for any batch size, and search for the largest batch or the longest sequence that fits.

A trace takes seconds, but a replay of its allocations takes milliseconds. If the sequence of events does not depend on
the batch size, each event allocates or frees a + b * batch bytes. Two traces determine a and b for every event, so any
other batch size can be replayed without a trace. Two more traces then confirm the result of a search. A search for the
longest sequence needs three traces, because attention can keep memory that grows with the square of the length.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

from headway.common.garbage import pause_garbage_collection
from headway.core.training.forecast_types import Forecast
from headway.errors import ConfigError
from headway.forecasting.answer import build_forecast, replay_on_device
from headway.forecasting.device.allocator import MemoryEvent, separate_unsure
from headway.forecasting.device.devices import Device, compute_allocator_limit, estimate_use
from headway.forecasting.tracing.fake import Spread, trace_step
from headway.forecasting.tracing.repeats import RepeatProof
from headway.forecasting.tracing.step import StepRecipe
from headway.forecasting.tracing.trace import Trace

logger = logging.getLogger(__name__)

_DEFAULT_LIMIT = 1 << 20
"""Default upper limit of a search for the largest batch size or the longest sequence."""
PROBE = 8
"""First size that a search traces: a batch size, or a sequence length as a multiple of `LongestSequence.multiple`.

With smaller batches, a model can take other branches and use other kernels.
"""
_CURVE_POINTS = 12
"""Number of batch sizes on the curve of memory against batch size."""
_MAX_ROUNDS = 6
"""Maximum number of rounds in which a search traces other sizes, because the events of larger sizes differ."""
_SAMPLES = 16
"""Number of smaller sizes that are checked before a search returns a size.

The check is needed because fragmentation can make a smaller batch use more memory than a larger one.
"""


@dataclass(frozen=True)
class LongestSequence:
    """Options of a search for the longest sequence that fits.

    Attributes:
        batch_fn: Function that makes a micro-batch, called as `batch_fn(batch_size, length)`.
        limit: Longest sequence to try, such as the model's maximum.
        multiple: Step between the lengths to try. Every length is a multiple of it.
    """

    batch_fn: Callable[[int, int], Any]
    limit: int = _DEFAULT_LIMIT
    multiple: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.multiple <= self.limit:
            raise ConfigError(
                f"LongestSequence(limit={self.limit}, multiple={self.multiple}): give a multiple of 1 or more, and a limit that is "
                "no smaller"
            )


class SizedEvents:
    """Allocation events of a step for any size, interpolated from traces of a few sizes.

    A size is a batch size or a sequence length. The bytes of each event are a polynomial of the size, computed with
    Newton's forward differences. Two traces determine a polynomial of degree one, and three traces one of degree two.

    Args:
        traces: Events of the traces at consecutive sizes, in ascending order of size. All traces must have the same
            sequence of events (see `is_same_sequence`), which is not checked here.
        first_size: Size of the first trace.
    """

    def __init__(self, traces: Sequence[list[MemoryEvent]], first_size: int) -> None:
        self._first_size = first_size
        self._columns = list(zip(*traces[0]))  # one tuple per field of `MemoryEvent`
        # Item n has the n-th forward difference of each event's bytes at the first size.
        self._differences: list[list[int]] = []
        columns = [[event.num_bytes for event in trace] for trace in traces]
        while columns:
            self._differences.append(columns[0])
            columns = [[later - value for value, later in zip(*pair)] for pair in pairwise(columns)]

    def compute_sizes(self, size: int) -> list[int]:
        """Return the bytes of every allocation event of a step at a given batch size or sequence length.

        They are negative for releases.
        """
        num_bytes, binomial = self._differences[0], 1
        for order, differences in enumerate(self._differences[1:]):
            binomial = binomial * (size - self._first_size - order) // (order + 1)
            num_bytes = [total + binomial * difference for total, difference in zip(num_bytes, differences)]
        return num_bytes

    @pause_garbage_collection()
    def build_events(self, size: int) -> list[MemoryEvent]:
        """Return the allocation events of a step at a given batch size or sequence length."""
        keys, _, *other_fields = self._columns
        # Joined by columns instead of a Python loop over events, because a search builds the events of many sizes.
        return list(map(MemoryEvent._make, zip(keys, self.compute_sizes(size), *other_fields)))


def is_same_sequence(first: list[MemoryEvent], second: list[MemoryEvent]) -> bool:
    """Whether two traces allocate and free the same keys in the same order, by the same operations.

    The bytes of the events can differ, and so can their kinds, source lines and streams.
    """
    if len(first) != len(second):
        return False
    return all(
        one.key == other.key and one.operation == other.operation and (one.num_bytes < 0) == (other.num_bytes < 0)
        for one, other in zip(first, second)
    )


class BudgetSearch:
    """Search for the largest batch, or the longest sequence, whose memory fits into a given number of bytes.

    A size is a batch size, or a sequence length as a multiple of `LongestSequence.multiple`.

    Args:
        trace_events: Function that traces a step of a given size and returns its allocation events. Its results are
            cached.
        measure_peak: Function that returns the peak memory in bytes for a list of events.
        capacity: Available bytes.
        limit: Largest size to try.
        degree: Degree of the polynomial that gives an event's bytes: 1 for batch sizes, 2 for sequence lengths, because
            of attention.
    """

    def __init__(
        self,
        trace_events: Callable[[int], list[MemoryEvent]],
        measure_peak: Callable[[list[MemoryEvent]], int],
        capacity: int,
        limit: int = _DEFAULT_LIMIT,
        degree: int = 1,
    ) -> None:
        self._trace_events = cache(trace_events)
        self._measure_peak = measure_peak
        self._capacity = capacity
        self._limit = limit
        self._degree = degree
        self._sized: dict[int, SizedEvents | None] = {}

    def find_largest(self) -> int:
        """Return the largest size whose step fits in memory, or 0 if not even size 1 fits.

        A size is a batch size, or a sequence length as a multiple of `LongestSequence.multiple`.

        Traces confirm that the returned size fits and that the next size does not. The next size is not traced if the
        returned size is the largest allowed one.
        """
        bound = self._limit
        sized = self._fit_events(PROBE) if PROBE + self._degree <= bound else None
        for _ in range(_MAX_ROUNDS):
            if sized is None:
                break
            size = self._lower_below_gaps(sized, self._bisect_synthetic(sized, bound))
            if size == 0:
                return self._bisect_size(self._can_fit, PROBE) if self._can_fit(1) else 0
            if self._can_fit(size):
                if size == bound or not self._can_fit(size + 1):
                    return size
                return self._bisect_size(self._can_fit, bound, size + 1)
            bound = size - 1
            # Large sizes have another sequence of events than small ones, so interpolate from traces near this size.
            sized = self._fit_events(max(1, size - self._degree))
        return self._bisect_size(self._can_fit, bound)

    def _fit_events(self, first_size: int) -> SizedEvents | None:
        """Return the bytes of each allocation event as a function of the size, or None if the traces differ.

        A size is a batch size or a sequence length. The function is fitted to traces at `first_size` and the one or
        two sizes after it. Traces differ if they have different sequences of events.

        Args:
            first_size: Smallest size to trace.
        """
        if first_size not in self._sized:
            traces = [self._trace_events(first_size + step) for step in range(self._degree + 1)]
            first = traces[0]
            is_regular = first and all(is_same_sequence(first, trace) for trace in traces[1:])
            self._sized[first_size] = SizedEvents(traces, first_size) if is_regular else None
        return self._sized[first_size]

    def compute_curve(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Return pairs of (size, peak bytes). Sizes below `PROBE` are traced, and others extrapolated from a few traces.

        The list is empty if the traces to extrapolate from have different sequences of events.

        Args:
            sizes: Sizes to compute the memory for.
        """
        sized = self._fit_events(PROBE)
        if sized is None:
            return []
        curve: list[tuple[int, int]] = []
        for size in sizes:
            events = self._trace_events(size) if size < PROBE else sized.build_events(size)
            curve.append((size, self._measure_peak(events)))
        return curve

    def _bisect_synthetic(self, sized: SizedEvents, bound: int) -> int:
        """Return the largest size up to `bound` at which a step fits, according to its interpolated events.

        The total size of the tensors in use is quick to compute, and the allocator reserves only slightly more memory.
        So events are replayed only where this total is near the capacity.

        Args:
            sized: Interpolated events.
            bound: Largest size to consider.
        """

        def can_tensors_fit(size: int) -> bool:
            return max(accumulate(sized.compute_sizes(size))) <= self._capacity

        can_fit = partial(self._can_fit_synthetic, sized)
        upper_bound = self._bisect_size(can_tensors_fit, bound)
        likely_size = upper_bound - upper_bound // 8
        fitting = likely_size if likely_size and can_fit(likely_size) else 0
        return self._bisect_size(can_fit, upper_bound, fitting)

    def _can_fit_synthetic(self, sized: SizedEvents, size: int) -> bool:
        """Whether a step of a given size fits into the capacity, according to its interpolated events."""
        return self._measure_peak(sized.build_events(size)) <= self._capacity

    def _lower_below_gaps(self, sized: SizedEvents, size: int) -> int:
        """Return `size`, or a smaller size if any sampled size between `size // 2` and `size` does not fit.

        Because of fragmentation, a smaller size sometimes needs more memory than a larger one. The result is below
        every sampled size that does not fit.

        Args:
            sized: Interpolated events.
            size: Size that fits.
        """
        stride = max(1, size // (2 * _SAMPLES))
        sampled = range(size - stride, size // 2, -stride)
        too_large = [sample for sample in sampled if not self._can_fit_synthetic(sized, sample)]
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
        return self._measure_peak(self._trace_events(size)) <= self._capacity


@dataclass
class StepForecaster:
    """Forecaster of one training step at any batch size. Each batch size is traced at most once.

    Attributes:
        model_fn: Function that makes the model. It is called in a context in which parameters take no memory.
        batch_fn: Function that makes a micro-batch from a number of samples. If the recipe has lengths, it also takes a
            sequence length.
        recipe: Configuration of the training step.
        device: Device to forecast for.
        prepare: Function that changes the model before the first step, or None.
        is_expandable: Whether the allocator uses `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.
        spread: Function that distributes the model over ranks, or None for one process.
        counts_work: Whether traces also count floating point operations and memory traffic.
        can_repeat: Whether `spread` treats all of the model's repeated blocks equally, so that a trace of a few of them
            can be extrapolated.
        num_traces: Number of steps traced so far.
    """

    model_fn: Callable[[], nn.Module]
    batch_fn: Callable[..., Any]
    recipe: StepRecipe
    device: Device
    prepare: Callable[[nn.Module], object] | None = None
    is_expandable: bool = False
    spread: Spread | None = None
    counts_work: bool = False
    can_repeat: bool = True
    num_traces: int = field(default=0, init=False)
    _traces: dict[int, Trace] = field(default_factory=dict, init=False)
    _proofs: list[RepeatProof] = field(default_factory=list, init=False)

    def forecast(
        self, batch_size: int, limit: int | None, largest: bool = False, longest: LongestSequence | None = None
    ) -> Forecast:
        """Forecast the memory of a step. If the memory limit is known, also run the requested searches.

        Args:
            batch_size: Samples per micro-batch.
            limit: Bytes that the process may use in total, or None if unknown. If it is None, no search runs.
            largest: Whether to search for the largest batch. Default: False.
            longest: Options of the search for the longest sequence at this batch size. None: no search. Default: None.

        Raises:
            ConfigError: If a user's own loop does not call backward, or makes too few updates.
            LossError: If the loss is not a scalar with a gradient.
            UnsupportedError: If the step cannot be traced. The message names the operation and the user's line.
        """
        began = time.perf_counter()
        forecast = build_forecast(self.trace(batch_size), self.device, batch_size, limit, self.is_expandable)
        if limit is not None:
            capacity = compute_allocator_limit(self.device, limit)
            if largest:
                batch = self.find_largest_batch(capacity)
                curve = self.compute_curve(_choose_curve_sizes(batch))
                by_batch = tuple((size, estimate_use(self.device, reserved).most) for size, reserved in curve)
                forecast = replace(forecast, largest_batch=batch, by_batch=by_batch)
            if longest is not None:
                length = self._find_longest_sequence(longest, batch_size, capacity)
                forecast = replace(forecast, longest_sequence=length)
        return replace(forecast, num_traces=self.num_traces, seconds=time.perf_counter() - began)

    def trace(self, batch_size: int) -> Trace:
        """Trace a step at a batch size, or return the cached trace.

        Raises:
            ConfigError: If a user's own loop does not call backward, or makes too few updates.
            LossError: If the loss is not a scalar with a gradient.
            UnsupportedError: If the step cannot be traced. The message names the operation and the user's line.
        """
        if batch_size not in self._traces:
            self._traces[batch_size] = self._trace_batch(partial(self.batch_fn, batch_size), f"{batch_size} samples")
        return self._traces[batch_size]

    def find_largest_batch(self, capacity: int, limit: int = _DEFAULT_LIMIT) -> int:
        """Return the largest batch size up to `limit` for which the allocator needs at most `capacity` bytes.

        Return 0 if not even one sample fits.
        """
        return self._make_search(capacity, limit).find_largest()

    def compute_curve(self, batches: Sequence[int]) -> list[tuple[int, int]]:
        """Return pairs of (batch size, peak reserved bytes), extrapolated from traces of the batches `PROBE` and one more.

        The bytes of each allocation are assumed to be linear in the batch size. Batches smaller than `PROBE` are traced
        one by one. The list is empty if the two traces have different sequences of events.

        Args:
            batches: Batch sizes to compute the memory for.
        """
        return self._make_search(0).compute_curve(batches)

    def _make_search(self, capacity: int, limit: int = _DEFAULT_LIMIT) -> BudgetSearch:
        return BudgetSearch(lambda size: self.trace(size).events, self._measure_reserved, capacity, limit)

    def _find_longest_sequence(self, longest: LongestSequence, batch_size: int, capacity: int) -> int:
        """Return the longest sequence for which the allocator needs at most `capacity` bytes, or 0 if there is none.

        Args:
            longest: Options of the search.
            batch_size: Samples per micro-batch.
            capacity: Available bytes.
        """

        def trace_events(size: int) -> list[MemoryEvent]:
            length = size * longest.multiple
            batch = partial(longest.batch_fn, batch_size, length)
            return self._trace_batch(batch, f"{batch_size} x {length:,}").events

        limit = longest.limit // longest.multiple
        search = BudgetSearch(trace_events, self._measure_reserved, capacity, limit, degree=2)
        return search.find_largest() * longest.multiple

    def _trace_batch(self, batch: Callable[..., Any], description: str) -> Trace:
        self.num_traces += 1
        logger.info("tracing a step of %s", description)
        return trace_step(
            self.model_fn,
            batch,
            self.recipe,
            self.device,
            prepare=self.prepare,
            spread=self.spread,
            counts_work=self.counts_work,
            can_repeat=self.can_repeat,
            proofs=self._proofs,
        )

    @pause_garbage_collection()
    def _measure_reserved(self, events: list[MemoryEvent]) -> int:
        """Return the peak bytes that the allocator reserves, plus the bytes of an allocation that might not occur."""
        known, unsure = separate_unsure(events)
        return replay_on_device(known, self.device, self.is_expandable).reserved + unsure


def _choose_curve_sizes(largest: int) -> list[int]:
    """Return the batch sizes to show on the curve of memory against batch size, up to a quarter above the largest.

    Args:
        largest: Largest batch size that fits, or 0 if none fits.
    """
    end = max(PROBE, largest + largest // 4)
    return sorted({max(1, round(end * point / _CURVE_POINTS)) for point in range(1, _CURVE_POINTS + 1)})
