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

_COLUMNS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 3}
_TF32 = 2


def look_up_peak(name: str, dtype: torch.dtype, uses_tf32: bool = False) -> PeakRate | None:
    """Return the peak FLOP/s that the manufacturer states for a device.

    Return None if the device or the dtype is not in the table.

    Args:
        name: Device name as the driver reports it, for example "NVIDIA H100 80GB HBM3".
        dtype: dtype of the matrix products.
        uses_tf32: Whether float32 products run in TF32. Default: False.
    """
    words = f" {name} ".replace("-", " ")
    for known, figures in DATA_SHEETS.items():
        # Whole words: an "L4" is no "L40", and an "A30" no "A300".
        if f" {known.replace('-', ' ')} " in words:
            column = _TF32 if dtype == torch.float32 and uses_tf32 and figures[_TF32] else _COLUMNS.get(dtype)
            found = None if column is None else figures[column]
            return None if found is None else PeakRate(found * 1e12, f"stated for {known}")
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
    best, begun = float("inf"), time.perf_counter()
    num_done = 0
    while num_done < 3 or time.perf_counter() - begun < seconds:
        synchronize()
        start = time.perf_counter()
        left @ right
        synchronize()
        best = min(best, time.perf_counter() - start)
        num_done += 1
    return PeakRate(2.0 * size**3 / best, "measured")


def get_peak(device: torch.device, dtype: torch.dtype) -> PeakRate:
    """Return the device's peak FLOP/s for products of this dtype.

    The result is the manufacturer's value if known, otherwise a measured value.
    """
    tell = None if device.type == "cpu" else HARDWARE[device.type].find_function("get_device_name")
    if tell is not None:
        uses_tf32 = torch.get_float32_matmul_precision() != "highest" or torch.backends.cuda.matmul.allow_tf32
        found = look_up_peak(tell(device), dtype, uses_tf32)
        if found is not None:
            return found
    return measure_peak(device, dtype)


log = get_logger(__name__)


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
        self._active = events.active
        self._clock = clock
        self._runtime = runtime
        self._now = now
        self._peak: PeakRate | None = None
        # the lap
        self._reader: PreparedLoader | None = None
        self._asked = self._came = self._began = 0.0
        self._is_open = self._is_there = False
        # the counters
        self._seconds = self._waited = self._samples = 0.0
        self._tokens: float | torch.Tensor = 0.0
        self._has_tokens = False
        self._last = self._shown = _CounterValues()
        self._asked_for: tuple[_CounterValues, Readback] | None = None
        self._late = _CounterValues()
        # FLOPs
        self._is_armed = False
        self._is_spoilt = False
        self._counter: Any = None
        self._event: Any = None
        self._paces = RankPaces(runtime, clock.num_updates)
        events.before_fetch.append(self._on_fetch)
        events.after_fetch.append(self._on_batch)
        events.after_pass.append(self._on_pass_end)
        step.hooks.before_backward.append(self._on_backward)

    # ---------------------------------------------------------------- moments

    def _on_fetch(self, loader: PreparedLoader) -> None:
        """Handle a request for a batch, which ends the previous lap (the time from one request to the next)."""
        now = self._now()
        self._end_lap(now)
        self._reader, self._asked, self._is_there = loader, now, False
        if self._paces.is_due(self._clock.num_updates, self.every):
            self._paces.publish_pace(self._clock.num_updates, self.seconds, self._waited, self.factor)
            self._asked = self._now()

    def _on_batch(self, loader: PreparedLoader) -> None:
        """Handle the arrival of the requested batch: record its time."""
        self._came, self._is_there = self._now(), True
        if self._is_armed:
            from torch.utils.flop_counter import FlopCounterMode

            self._is_armed = False
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()
        if self._runtime.device.type != "cpu":
            self._event = self._record_event()

    def _on_pass_end(self) -> None:
        """Handle the end or interruption of a pass over the loader, which ends the current lap.

        A lap is the time from one request for a batch to the next.
        """
        self._end_lap(self._now())
        self._is_there = False

    def _on_backward(self) -> None:
        """Handle a backward. At the first one of a batch, count the time since the batch was requested."""
        if self._is_open and self._is_there:
            return
        now, active = self._now(), self._active
        if self._is_open:
            self._end_lap(now)
        self._is_open = True
        if not self._is_there or not active or active[-1] is not self._reader:
            self._began = now  # the batch is not from a prepared loader: its lap lasts until the next backward
            return
        self._began = self._asked
        self._waited += self._came - self._asked
        self._samples += self._reader.num_consumed - self._reader.num_consumed_before
        if not self._paces.is_full:
            self._paces.add_forward(now - self._came if self._event is None else (self._event, self._record_event()))

    def _end_lap(self, now: float) -> None:
        if self._counter is not None:
            self._finish_counting()
        if self._is_open:
            self._seconds += now - self._began
            self._is_open = False

    def _record_event(self) -> Any:
        event = torch.Event(device=self._runtime.device, enable_timing=True)
        event.record()
        return event

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context whose duration is excluded from the throughput, such as the duration of a save.

        It is also needed around an evaluation that does not use a prepared loader.
        """
        was_open, begun = self._is_open, self._now()
        self._end_lap(begun)
        try:
            yield
        finally:
            now = self._now()
            self._asked += now - begun  # shift the start of a lap that is not counted yet by the length of the pause
            self._came += now - begun
            self._began, self._is_open = now, was_open

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
        found = self._compute_figures(self._last, reading)
        if found:
            self._last = reading
            found |= {f"data_wait/rank_{pace.rank}": pace.data_wait for pace in self._paces.known}
        return found

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
        return self._seconds + (self._now() - self._began if self._is_open else 0.0)

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
        asked = self._asked_for
        if asked is not None and asked[1].is_ready:
            self._late = replace(asked[0], tokens=float(asked[1].read()))
            asked = None
        if asked is None:
            self._asked_for = now, Readback(self._tokens)
        return (self._late, True) if self._late.seconds else (now, False)

    def _compute_figures(self, before: _CounterValues, after: _CounterValues) -> dict[str, float]:
        seconds = after.seconds - before.seconds
        if seconds <= 0:
            return {}
        found = {}
        samples, tokens = after.samples - before.samples, after.tokens - before.tokens
        if samples:
            found["samples_per_second"] = samples / seconds
        if tokens:
            found["tokens_per_second"] = tokens * self._step.strategy.data_shard.count / seconds
        if self.flops_per_token is not None and tokens:
            found["mfu"] = self.flops_per_token * found["tokens_per_second"] / self._sum_peaks()
        elif self.flops_per_sample is not None and samples:
            found["mfu"] = self.flops_per_sample * found["samples_per_second"] / self._sum_peaks()
        found["data_wait"] = (after.waited - before.waited) / seconds
        return found

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
        reading, is_whole = self._read_late()
        found = self._compute_figures(self._shown, reading)
        if is_whole and reading.seconds - self._shown.seconds > 5:
            self._shown = reading
        parts = [
            f"{found[f'{name}_per_second']:,.0f} {name}/s"
            for name in ("samples", "tokens")
            if f"{name}_per_second" in found
        ]
        parts += [f"{found['mfu']:.0%} mfu"] if "mfu" in found else []
        parts += [f"{found['data_wait']:.0%} waiting for data"] if found else []
        return ", ".join(parts) or "no batch yet"

    # ---------------------------------------------------------------- FLOPs

    def count_flops(self) -> None:
        """Count the FLOPs per sample in the next batch of a prepared loader, and use this count for all later batches.

        Forward and backward are counted with torch.utils.flop_counter: matrix products, convolutions and attention,
        including those that activation checkpointing repeats. Set `flops_per_sample` instead if repeated operations
        must not count. The counted batch runs more slowly.
        """
        self._is_armed = True

    def _finish_counting(self) -> None:
        counter = self._counter
        assert counter is not None
        if get_current_dispatch_mode() is not counter.mode:
            self._is_spoilt = (
                True  # the caller's own dispatch mode has to end first, and other batches are counted until then
            )
            return
        self._counter = None
        counter.__exit__(None, None, None)
        rows = None if self._reader is None else self._reader.num_rows
        if self._is_spoilt or not self._is_open or not rows:  # such as an evaluation batch: try the next one
            self._is_armed, self._is_spoilt = True, False
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
        given = (
            flops_per_second if isinstance(flops_per_second, PeakRate) else PeakRate(float(flops_per_second), "given")
        )
        if not given.flops_per_second > 0:
            raise ConfigError(f"peak={given.flops_per_second!r} must be a number of FLOP/s above 0")
        self._peak = given

    def _find_dtype(self) -> torch.dtype:
        found = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self._step.precision.name)
        if found is not None:
            return found
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
