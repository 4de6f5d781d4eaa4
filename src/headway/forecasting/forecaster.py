"""Forecast a training step for any batch size, and the largest batch or the longest sequence within a memory limit."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from headway.common.garbage import pause_garbage_collection
from headway.core.training.forecast_types import Forecast
from headway.errors import ConfigError
from headway.forecasting.budget_search import DEFAULT_LIMIT, PROBE, BudgetSearch
from headway.forecasting.device.devices import Device, compute_allocator_limit, estimate_use
from headway.forecasting.device.memory_events import StepMemory
from headway.forecasting.forecast_builder import build_forecast, replay_on_device
from headway.forecasting.tracing.recipe import StepRecipe
from headway.forecasting.tracing.repeats import RepeatProof
from headway.forecasting.tracing.trace import Trace
from headway.forecasting.tracing.trace_step import DistributeModel, trace_step

logger = logging.getLogger(__name__)

_CURVE_POINTS = 12
"""Number of batch sizes on the curve of memory against batch size."""


@dataclass(frozen=True)
class LongestSequence:
    """Options of a search for the longest sequence that fits, for `headway.forecast(longest=...)`.

    Attributes:
        batch_fn: Function that makes a micro-batch, called as `batch_fn(batch_size, length)`, with the length in tokens.
        limit: Longest sequence to try in tokens, such as the model's maximum. Default: 1,048,576.
        multiple: Step between the lengths to try, at least 1. Every length is a multiple of it. Default: 64.

    Raises:
        ConfigError: If `multiple` is less than 1 or larger than `limit`.
    """

    batch_fn: Callable[[int, int], Any]
    limit: int = DEFAULT_LIMIT
    multiple: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.multiple <= self.limit:
            raise ConfigError(
                f"LongestSequence(limit={self.limit}, multiple={self.multiple}): give a multiple of 1 or more, and a limit that is "
                "no smaller"
            )


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
        distribute_model: Function that distributes the model over ranks, or None for one process.
        counts_work: Whether traces also count floating-point operations and memory traffic.
        can_repeat: Whether `distribute_model` treats all of the model's repeated blocks equally, so that a trace of a
            few of them can be extrapolated.
        num_traces: Number of steps traced so far.
    """

    model_fn: Callable[[], nn.Module]
    batch_fn: Callable[..., Any]
    recipe: StepRecipe
    device: Device
    prepare: Callable[[nn.Module], object] | None = None
    is_expandable: bool = False
    distribute_model: DistributeModel | None = None
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

    def find_largest_batch(self, capacity: int, limit: int = DEFAULT_LIMIT) -> int:
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

    def _make_search(self, capacity: int, limit: int = DEFAULT_LIMIT) -> BudgetSearch:
        """Return a search for the largest batch size whose reserved memory fits.

        Args:
            capacity: Bytes that the allocator may reserve.
            limit: Largest batch size to consider.
        """
        return BudgetSearch(lambda size: self.trace(size).memory, self._measure_reserved, capacity, limit)

    def _find_longest_sequence(self, longest: LongestSequence, batch_size: int, capacity: int) -> int:
        """Return the longest sequence for which the allocator needs at most `capacity` bytes, or 0 if there is none.

        Args:
            longest: Options of the search.
            batch_size: Samples per micro-batch.
            capacity: Available bytes.
        """

        def trace_memory(size: int) -> StepMemory:
            length = size * longest.multiple
            batch = partial(longest.batch_fn, batch_size, length)
            return self._trace_batch(batch, f"{batch_size} x {length:,}").memory

        limit = longest.limit // longest.multiple
        search = BudgetSearch(trace_memory, self._measure_reserved, capacity, limit, degree=2)
        return search.find_largest() * longest.multiple

    def _trace_batch(self, batch: Callable[..., Any], description: str) -> Trace:
        """Trace a step with batches of one kind.

        Args:
            batch: Function that makes a micro-batch.
            description: Description of the batch for the log.
        """
        self.num_traces += 1
        logger.info("tracing a step of %s", description)
        return trace_step(
            self.model_fn,
            batch,
            self.recipe,
            self.device,
            prepare=self.prepare,
            distribute_model=self.distribute_model,
            counts_work=self.counts_work,
            can_repeat=self.can_repeat,
            proofs=self._proofs,
        )

    @pause_garbage_collection()
    def _measure_reserved(self, memory: StepMemory) -> int:
        """Return the peak bytes that the allocator reserves, plus those that a run might need in addition."""
        return replay_on_device(memory.events, self.device, self.is_expandable).reserved + memory.unsure_bytes


def _choose_curve_sizes(largest: int) -> list[int]:
    """Return the batch sizes to show on the curve of memory against batch size, up to a quarter above the largest.

    Args:
        largest: Largest batch size that fits, or 0 if none fits.
    """
    end = max(PROBE, largest + largest // 4)
    return sorted({max(1, round(end * point / _CURVE_POINTS)) for point in range(1, _CURVE_POINTS + 1)})
