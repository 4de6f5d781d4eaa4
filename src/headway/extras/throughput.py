"""Throughput of the training loop: samples, tokens, FLOPs and the time spent waiting for data.

Hooks of the loader and of backward record times. This needs no communication between ranks, and the host never waits
for a device::

    fetch ------ fetched ------- backward ---- ... step, logging ... ---- fetch
      | waiting for data | forward |                                       |
      +----------------- a lap, counted if a backward came ----------------+

Passes without a backward (evaluation) belong to no lap. On an accelerator the host runs ahead of the device. So
rates are right over many steps, and the time spent waiting for data is an upper bound: it counts even while the
device still has work.

The peak FLOP/s of a device is the manufacturer's value for dense matrix products
(`forecasting/device/data_sheets.py`). A device that is not in that table, such as any CPU, is measured by products of
square matrices. The fastest product gives a lower bound of the peak. Fractions of a measured peak are comparable on one
machine only. `PeakRate.source` distinguishes the two cases.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from headway.core.data.loader import LoaderEvents, PreparedLoader
from headway.core.runtime import events, process
from headway.core.runtime.device import HARDWARE
from headway.core.runtime.process import ProcessRuntime
from headway.core.runtime.readback import Readback
from headway.core.training.interfaces import PeakRate, RankPace, ThroughputMeter
from headway.core.training.step import TrainingStep
from headway.core.training.windows import UpdateClock
from headway.errors import ConfigError
from headway.extras._torch import get_current_dispatch_mode
from headway.extras.stragglers import RankPaces, find_stragglers
from headway.forecasting.device.data_sheets import DATA_SHEETS
from headway.log import get_logger

log = get_logger(__name__)

# Columns of `DATA_SHEETS` by dtype. float32 products can run in TF32, which has its own column.
_COLUMNS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 3}
_TF32_COLUMN = 2


def look_up_peak(name: str, dtype: torch.dtype, uses_tf32: bool = False) -> PeakRate | None:
    """Return the peak FLOP/s that the manufacturer states for a device.

    Return None if the device or the dtype is not in the table.

    Args:
        name: Device name as the driver reports it, for example "NVIDIA H100 80GB HBM3".
        dtype: dtype of the matrix products.
        uses_tf32: Whether float32 products run in TF32. Default: False.
    """
    words = f" {name} ".replace("-", " ")
    for device_name, teraflops in DATA_SHEETS.items():
        # Whole words: an "L4" is no "L40", and an "A30" no "A300".
        if f" {device_name.replace('-', ' ')} " not in words:
            continue
        column = _COLUMNS.get(dtype)
        if dtype == torch.float32 and uses_tf32 and teraflops[_TF32_COLUMN]:
            column = _TF32_COLUMN
        peak = None if column is None else teraflops[column]
        return None if peak is None else PeakRate(peak * 1e12, f"stated for {device_name}")
    return None


def measure_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> PeakRate:
    """Measure a device's peak FLOP/s: the highest speed that it reaches in several products of square matrices.

    Args:
        device: Device to measure.
        dtype: dtype of the matrices.
        seconds: Approximate duration of the measurement. At least three products are computed. Default: 0.3.
    """
    synchronize = HARDWARE[device.type].synchronize
    size = 1024 if device.type == "cpu" else 4096
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    shortest, begin_time = float("inf"), time.perf_counter()
    num_products = 0
    while num_products < 3 or time.perf_counter() - begin_time < seconds:
        synchronize()
        product_time = time.perf_counter()
        left @ right
        synchronize()
        shortest = min(shortest, time.perf_counter() - product_time)
        num_products += 1
    return PeakRate(2.0 * size**3 / shortest, "measured")


def get_peak(device: torch.device, dtype: torch.dtype) -> PeakRate:
    """Return the device's peak FLOP/s for products of this dtype.

    The result is the manufacturer's value if known, otherwise a measured value.
    """
    get_name = None if device.type == "cpu" else HARDWARE[device.type].find_function("get_device_name")
    if get_name is not None:
        uses_tf32 = torch.get_float32_matmul_precision() != "highest" or torch.backends.cuda.matmul.allow_tf32
        stated_peak = look_up_peak(get_name(device), dtype, uses_tf32)
        if stated_peak is not None:
            return stated_peak
    return measure_peak(device, dtype)


@dataclass(frozen=True)
class _CounterValues:
    """Values of the throughput meter's counters at one moment.

    Attributes:
        seconds: Total duration of the counted laps, in seconds. A lap is the time between two requests for a batch.
        waited: Seconds within these laps for which this rank waited for data.
        samples: Number of samples that all ranks have processed.
        tokens: Number of tokens that this rank has processed. 0 if tokens are not counted.
    """

    seconds: float = 0.0
    waited: float = 0.0
    samples: float = 0.0
    tokens: float = 0.0


class Throughput(ThroughputMeter):
    """Meter of the training loop's throughput since its creation. `accelerator.throughput` creates it.

    Example::

        throughput = accelerator.throughput
        throughput.count_flops()
        for step, (inputs, targets) in enumerate(loader):
            ...
            throughput.add(tokens=inputs.numel())
            if step % 100 == 99:
                accelerator.log(throughput.values(), step=step)

    Args:
        step: Training step of the Accelerator.
        events: Events of the Accelerator's loaders.
        clock: Update clock of the Accelerator.
        runtime: Runtime of this process.
        now: Function that returns the time in seconds. Default: `time.perf_counter`.

    Attributes:
        every: Number of updates between two reports of each rank's step times.
        factor: Multiple of the median forward time above which a rank is a straggler.
        flops_per_sample: FLOPs of forward and backward per sample, for "mfu". None: unknown.
        flops_per_token: FLOPs of forward and backward per token, for "mfu". None: unknown. A common estimate for a
            transformer without recomputation is 6 x parameters (Kaplan et al. 2020, section 2.1).
    """

    def __init__(
        self,
        step: TrainingStep,
        events: LoaderEvents,
        clock: UpdateClock,
        runtime: ProcessRuntime,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.every = 50
        self.factor = 1.3
        self.flops_per_sample: float | None = None
        self.flops_per_token: float | None = None
        self._step = step
        self._active = events.active_loaders
        self._clock = clock
        self._runtime = runtime
        self._now = now
        self._peak: PeakRate | None = None
        # The current lap: the time from one request for a batch to the next. Times are in seconds.
        self._reader: PreparedLoader | None = None  # loader of the last requested batch
        self._request_time = self._arrival_time = self._lap_start = 0.0
        self._arrival_event: Any = None  # on a device with events
        self._has_backward = False  # only then the lap counts
        self._has_batch = False  # whether the requested batch has arrived
        # Counters since the creation
        self._seconds = self._waited = self._samples = 0.0
        self._tokens: float | torch.Tensor = 0.0
        self._has_tokens = False
        # Earlier values of the counters: at the last call of `values`, in the last progress bar, and for `_read_late`
        self._last_values = self._last_shown = self._last_late = _CounterValues()
        self._pending_tokens: tuple[_CounterValues, Readback] | None = None  # values without tokens, and their tokens
        # FLOP counting
        self._should_count_flops = False  # in the next batch
        self._is_count_invalid = False
        self._flop_counter: Any = None
        self._paces = RankPaces(runtime, clock.num_updates)
        events.before_fetch_hooks.append(self._handle_request)
        events.after_fetch_hooks.append(self._handle_arrival)
        events.after_pass_hooks.append(self._handle_pass_end)
        step.hooks.before_backward.append(self._handle_backward)

    # ---------------------------------------------------------------- hooks

    def _handle_request(self, loader: PreparedLoader) -> None:
        """Handle a request for a batch, which ends the previous lap (the time from one request to the next)."""
        now = self._now()
        self._end_lap(now)
        self._reader, self._request_time, self._has_batch = loader, now, False
        if self._paces.is_due(self._clock.num_updates, self.every):
            self._paces.publish_pace(self._clock.num_updates, self.seconds, self._waited, self.factor)
            self._request_time = self._now()

    def _handle_arrival(self, loader: PreparedLoader) -> None:
        """Handle the arrival of the requested batch: record its time."""
        self._arrival_time, self._has_batch = self._now(), True
        if self._should_count_flops:
            from torch.utils.flop_counter import FlopCounterMode

            self._should_count_flops = False
            self._flop_counter = FlopCounterMode(display=False)
            self._flop_counter.__enter__()
        if self._runtime.device.type != "cpu":
            self._arrival_event = self._record_event()

    def _handle_pass_end(self) -> None:
        """Handle the end or interruption of a pass over the loader, which ends the current lap.

        A lap is the time from one request for a batch to the next.
        """
        self._end_lap(self._now())
        self._has_batch = False

    def _handle_backward(self) -> None:
        """Handle a backward. At the first one of a batch, count the time since the batch was requested."""
        if self._has_backward and self._has_batch:
            return
        now, active = self._now(), self._active
        if self._has_backward:
            self._end_lap(now)
        self._has_backward = True
        if not self._has_batch or not active or active[-1] is not self._reader:
            self._lap_start = now  # the batch is not from a prepared loader: its lap lasts until the next backward
            return
        self._lap_start = self._request_time
        self._waited += self._arrival_time - self._request_time
        self._samples += self._reader.num_consumed - self._reader.num_consumed_before
        if not self._paces.is_full:
            is_on_device = self._arrival_event is not None
            events = self._arrival_event, self._record_event() if is_on_device else None
            self._paces.add_forward(events if is_on_device else now - self._arrival_time)

    def _end_lap(self, now: float) -> None:
        if self._flop_counter is not None:
            self._finish_counting()
        if self._has_backward:
            self._seconds += now - self._lap_start
            self._has_backward = False

    def _record_event(self) -> Any:
        event = torch.Event(device=self._runtime.device, enable_timing=True)
        event.record()
        return event

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context whose duration is excluded from the throughput, such as the duration of a save.

        It is also needed around an evaluation that does not use a prepared loader.
        """
        was_open, begin_time = self._has_backward, self._now()
        self._end_lap(begin_time)
        try:
            yield
        finally:
            now = self._now()
            # Shift the start of a lap that is not counted yet by the length of the pause.
            self._request_time += now - begin_time
            self._arrival_time += now - begin_time
            self._lap_start, self._has_backward = now, was_open

    def add(self, tokens: float | torch.Tensor) -> None:
        """Count tokens that this rank has processed.

        Args:
            tokens: Number of tokens. A tensor on an accelerator is added on the device, and read when values are
                requested.
        """
        self._has_tokens = True
        self._tokens = self._tokens + (tokens.detach() if isinstance(tokens, torch.Tensor) else tokens)

    # ---------------------------------------------------------------- figures

    def values(self) -> dict[str, float]:
        """Return the throughput since the last call, as a dict that can be logged. Unknown values are left out.

        `samples_per_second` and `tokens_per_second` are for all data ranks together. Tokens are counted on this rank
        and multiplied by the number of data ranks. `data_wait` is the fraction of time, from 0 to 1, that this rank
        waited for data. On the main process of a run with several processes, `data_wait/rank_<n>` is this fraction on
        rank n, as of its latest report (see `every`). `mfu` is the FLOP/s of the model on all ranks, divided by their
        peak FLOP/s. The dict is empty if no step with a backward was completed.
        """
        reading = self._read_counters()
        figures = self._compute_figures(self._last_values, reading)
        if figures:
            self._last_values = reading
            figures |= {f"data_wait/rank_{pace.rank}": pace.data_wait for pace in self._paces.latest}
        return figures

    def total(self) -> dict[str, float]:
        """Return the throughput since the meter was created, under the keys of `values()` except `data_wait/rank_<n>`.

        The dict is empty if no step with a backward was completed. The call does not affect what `values()` returns.
        """
        return self._compute_figures(_CounterValues(), self._read_counters())

    @property
    def seconds(self) -> float:
        """Total duration of the counted laps, in seconds.

        A lap is the time between two requests for a batch. It counts only if a backward ran in it.
        """
        return self._seconds + (self._now() - self._lap_start if self._has_backward else 0.0)

    def _read_counters(self) -> _CounterValues:
        return _CounterValues(
            self.seconds, self._waited, self._samples, float(self._tokens) if self._has_tokens else 0.0
        )

    def _read_late(self) -> tuple[_CounterValues, bool]:
        """Return the counters' values without waiting for token counts that are still computed on the device.

        If these counts are not ready, return the values of an earlier call.

        Returns:
            The values, and whether they include tokens.
        """
        if not isinstance(self._tokens, torch.Tensor) or self._tokens.device.type == "cpu":
            return self._read_counters(), True
        now = _CounterValues(self.seconds, self._waited, self._samples)
        is_pending = False
        if self._pending_tokens is not None:
            earlier_values, tokens = self._pending_tokens
            is_pending = not tokens.is_ready
            if not is_pending:
                self._last_late = replace(earlier_values, tokens=float(tokens.read()))
        if not is_pending:
            self._pending_tokens = now, Readback(self._tokens)
        return (self._last_late, True) if self._last_late.seconds else (now, False)

    def _compute_figures(self, before: _CounterValues, after: _CounterValues) -> dict[str, float]:
        """Return the throughput between two moments, under the keys of `values()` except `data_wait/rank_<n>`."""
        seconds = after.seconds - before.seconds
        if seconds <= 0:
            return {}
        figures = {}
        samples, tokens = after.samples - before.samples, after.tokens - before.tokens
        if samples:
            figures["samples_per_second"] = samples / seconds
        if tokens:
            figures["tokens_per_second"] = tokens * self._step.strategy.data_shard.count / seconds
        if self.flops_per_token is not None and tokens:
            figures["mfu"] = self.flops_per_token * figures["tokens_per_second"] / self._sum_peaks()
        elif self.flops_per_sample is not None and samples:
            figures["mfu"] = self.flops_per_sample * figures["samples_per_second"] / self._sum_peaks()
        figures["data_wait"] = (after.waited - before.waited) / seconds
        return figures

    def show_in_bars(self) -> None:
        """Show the recent throughput in all progress bars of `headway.track` in this process."""
        if self.fact not in events.get_progress_texts():
            events.get_progress_texts().append(self.fact)
            process.release_at_end(self._remove_from_bars)

    def _remove_from_bars(self) -> None:
        if self.fact in events.get_progress_texts():
            events.get_progress_texts().remove(self.fact)

    def fact(self) -> str:
        """Return one line with samples per second, tokens per second and the time spent waiting for data.

        The values are averages over at least the last five seconds.
        """
        reading, is_complete = self._read_late()
        figures = self._compute_figures(self._last_shown, reading)
        if is_complete and reading.seconds - self._last_shown.seconds > 5:
            self._last_shown = reading
        parts = [
            f"{figures[f'{name}_per_second']:,.0f} {name}/s"
            for name in ("samples", "tokens")
            if f"{name}_per_second" in figures
        ]
        parts += [f"{figures['mfu']:.0%} mfu"] if "mfu" in figures else []
        parts += [f"{figures['data_wait']:.0%} waiting for data"] if figures else []
        return ", ".join(parts) or "no batch yet"

    # ---------------------------------------------------------------- FLOPs

    def count_flops(self) -> None:
        """Count the FLOPs per sample in the next batch of a prepared loader, and use this count for all later batches.

        Forward and backward are counted with torch.utils.flop_counter: matrix products, convolutions and attention,
        including those that activation checkpointing repeats. Set `flops_per_sample` instead if repeated operations
        must not count. The counted batch runs more slowly.
        """
        self._should_count_flops = True

    def _finish_counting(self) -> None:
        """Stop counting FLOPs at the end of a lap, and compute `flops_per_sample`. Count again if that is impossible."""
        counter = self._flop_counter
        assert counter is not None
        if get_current_dispatch_mode() is not counter.mode:
            # The caller's own dispatch mode must end first. Until then, other batches are counted, too.
            self._is_count_invalid = True
            return
        self._flop_counter = None
        counter.__exit__(None, None, None)
        rows = None if self._reader is None else self._reader.num_rows
        if (
            self._is_count_invalid or not self._has_backward or not rows
        ):  # such as an evaluation batch: try the next one
            self._should_count_flops, self._is_count_invalid = True, False
        elif counter.get_total_flops():
            self.flops_per_sample = counter.get_total_flops() / rows
            log.info("%.4g FLOPs a sample, counted on a batch of %d", self.flops_per_sample, rows)

    @property
    def peak(self) -> PeakRate:
        """Peak FLOP/s of one device in the run's precision.

        It is looked up or measured at the first access. Assign another value, in FLOP/s, if the manufacturer's value is
        wrong. A value that is not above 0 raises ConfigError.
        """
        if self._peak is None:
            self._peak = get_peak(self._runtime.device, self._find_dtype())
            log.info(
                "peak of %s: %.4g FLOP/s (%s)", self._runtime.device, self._peak.flops_per_second, self._peak.source
            )
        return self._peak

    @peak.setter
    def peak(self, flops_per_second: "float | PeakRate") -> None:
        if isinstance(flops_per_second, PeakRate):
            peak = flops_per_second
        else:
            peak = PeakRate(float(flops_per_second), "given")
        if not peak.flops_per_second > 0:
            raise ConfigError(f"peak={peak.flops_per_second!r} must be a number of FLOP/s above 0")
        self._peak = peak

    def _find_dtype(self) -> torch.dtype:
        autocast_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self._step.precision.name)
        if autocast_dtype is not None:
            return autocast_dtype
        parameters = self._step.prepared.list_parameters()
        return next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)

    def _sum_peaks(self) -> float:
        return self.peak.flops_per_second * self._runtime.world_size

    # ---------------------------------------------------------------- paces

    def paces(self) -> list[RankPace]:
        """Return the latest pace of each rank that has published one.

        A pace contains the median forward time in seconds, and the fraction of time spent waiting for data. Ranks
        publish their paces every `every` updates. No rank waits for another.
        """
        return self._paces.list_latest()

    def stragglers(self) -> dict[int, str]:
        """Return a description of each slow rank, by rank, from the latest paces that ranks have published.

        A rank is slow if its forward takes more than `factor` times the median of all ranks. It is also slow if the
        fraction of its time spent waiting for data exceeds the median by more than 0.1.
        """
        return find_stragglers(self._paces.list_latest(), self.factor)
