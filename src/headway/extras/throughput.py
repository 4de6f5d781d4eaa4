"""Throughput of the training loop: samples, tokens, FLOPs and the time spent waiting for data.

Hooks of the loader and of backward record times (`lap_clock.py`). This needs no communication between ranks, and the
host never waits for a device. On an accelerator the host runs ahead of the device. So rates are right over many steps,
and the time spent waiting for data is an upper bound: it counts even while the device still has work.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from headway.core.data.loader import LoaderEvents, PreparedLoader
from headway.core.runtime import events, process
from headway.core.runtime.process import ProcessRuntime
from headway.core.runtime.readback import Readback
from headway.core.training.interfaces import PeakRate, RankPace, ThroughputMeter
from headway.core.training.step import TrainingStep
from headway.core.training.update_clock import UpdateClock
from headway.errors import ConfigError
from headway.extras.flop_count import FlopCount
from headway.extras.lap_clock import LapClock
from headway.extras.peak_rate import get_peak
from headway.extras.stragglers import RankPaces, find_stragglers
from headway.log import get_logger

log = get_logger(__name__)

_MIN_BAR_SECONDS = 5.0
"""Number of measured seconds after which the average in progress bars begins anew."""


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


@dataclass
class _BarReadings:
    """Earlier values of the counters, for progress bars, which must not wait for a device.

    Attributes:
        first: Values at the beginning of the time over which bars show averages.
        complete: Latest values that include tokens.
        pending: Newer values without tokens, and their tokens, which the device may still compute. None: no such values.
    """

    first: _CounterValues = _CounterValues()
    complete: _CounterValues = _CounterValues()
    pending: tuple[_CounterValues, Readback] | None = None


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
        self._clock = clock
        self._runtime = runtime
        self._laps = LapClock(now, runtime.device, events.reads.active_loaders)
        self._paces = RankPaces(runtime, clock.num_updates)
        self._flop_count = FlopCount()
        self._peak: PeakRate | None = None
        self._seen = step.run.seen
        self._first_tokens = self._seen.tokens  # tokens that this rank had counted before the meter was created
        self._last_values = _CounterValues()  # at the last call of `values`
        self._bar_readings = _BarReadings()
        events.before_fetch_hooks.append(self._handle_request)
        events.after_fetch_hooks.append(self._handle_arrival)
        events.after_pass_hooks.append(self._handle_pass_end)
        step.hooks.before_backward.append(self._handle_backward)

    # ---------------------------------------------------------------- hooks

    def _handle_request(self, loader: PreparedLoader) -> None:
        """Handle a request for a batch, which ends the previous lap (the time from one request to the next).

        If a report to the other ranks is due, publish it. The time that this takes does not count for the next lap.
        """
        now = self._laps.now()
        self._end_lap(now)
        self._laps.record_request(loader, now)
        if self._paces.is_due(self._clock.num_updates, self.every):
            self._paces.publish_pace(self._clock.num_updates, self._laps.seconds, self._laps.waited, self.factor)
            self._laps.postpone_request()

    def _handle_arrival(self, loader: PreparedLoader) -> None:
        """Handle the arrival of the requested batch: record its time, and start to count FLOPs if that was requested."""
        self._laps.record_arrival()
        # Under `cp`, the first forward of a model also runs checks, whose operations must not count.
        if self._flop_count.is_requested and (self._laps.num_samples or self._ranks_per_sample == 1):
            self._flop_count.start()

    def _handle_pass_end(self) -> None:
        """Handle the end or interruption of a pass over the loader, which ends the current lap.

        A lap is the time from one request for a batch to the next.
        """
        self._end_lap(self._laps.now())
        self._laps.drop_batch()

    def _handle_backward(self) -> None:
        """Handle a backward. At the first one of a batch, count the batch's samples, and the time since its request."""
        if self._laps.has_counted_batch:
            return
        now = self._laps.now()
        if self._laps.has_backward:  # without a prepared loader, a lap ends at the next backward
            self._end_lap(now)
        forward = self._laps.record_backward(now, times_forward=not self._paces.is_full)
        if forward is not None:
            self._paces.add_forward(forward)

    def _end_lap(self, now: float) -> None:
        """End the current lap, and the count of FLOPs if one is running.

        Args:
            now: Current time in seconds.
        """
        if self._flop_count.is_running:
            num_rows = self._laps.num_rows
            num_flops = self._flop_count.finish(is_usable=self._laps.has_backward and bool(num_rows))
            if num_flops and num_rows:
                # This rank has counted only its part of each sample that it shares with other ranks.
                self.flops_per_sample = num_flops * self._ranks_per_sample / num_rows
                log.info("%.4g FLOPs a sample, counted on a batch of %d", self.flops_per_sample, num_rows)
        self._laps.end_lap(now)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context whose duration is excluded from the throughput, such as the duration of a save.

        It is also needed around an evaluation that does not use a prepared loader.
        """
        had_backward, begin_time = self._laps.has_backward, self._laps.now()
        self._end_lap(begin_time)
        try:
            yield
        finally:
            self._laps.resume(begin_time, had_backward)

    def add(self, tokens: float | torch.Tensor, padding: float | torch.Tensor = 0) -> None:
        """Count tokens that this rank has processed.

        Call it on every rank, before a save that follows the update on these tokens.

        Args:
            tokens: Number of tokens. A tensor on an accelerator is added on the device, and read when values are
                requested.
            padding: Number of padding tokens, which do not count as `tokens`. Only `seen` returns them. Default: 0.

        Raises:
            ConfigError: If a number is negative or not finite, or a tensor has several elements.
        """
        self._seen.add_tokens(tokens, padding)

    @property
    def _tokens(self) -> int | torch.Tensor:
        """Number of tokens that this rank has processed since the meter was created."""
        return self._seen.tokens - self._first_tokens

    # ---------------------------------------------------------------- figures

    def values(self) -> dict[str, float]:
        """Return the throughput since the last call, as a dict that can be logged. Unknown values are left out.

        `samples_per_second` and `tokens_per_second` are for all data ranks together. Tokens are counted on this rank
        and multiplied by the number of data ranks. `data_wait` is the fraction of time, from 0 to 1, that this rank
        waited for data. On the main process of a run with several processes, `data_wait/rank_<n>` is this fraction on
        rank n, as of its latest report (see `every`). `mfu` is the FLOP/s of the model on all ranks, divided by the
        number of ranks times the peak FLOP/s of this rank's device. The dict is empty if no step with a backward was completed.
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

    def seen(self) -> dict[str, int]:
        """Return how much data the run has trained on since its first update, on all ranks together.

        A resumed run continues the totals of its checkpoint. The keys are `num_updates`, `samples_seen`, `tokens_seen`
        and `padding_tokens_seen`. Samples are counted if they come from a prepared loader, and tokens if `add` was
        called. Totals of 0 are left out, except `num_updates`. Every rank must call this method, because it adds up the
        tokens of all ranks.
        """
        return {"num_updates": self._clock.num_updates, **self._seen.compute_totals().to_dict()}

    @property
    def seconds(self) -> float:
        """Total duration of the counted laps in seconds, including the current lap so far, without pauses.

        A lap is the time from one request for a batch to the next. It counts only if a backward ran in it, and then
        entirely. If the batch is not from a prepared loader, its lap is the time from its backward to the next
        backward.
        """
        return self._laps.seconds

    def _read_counters(self) -> _CounterValues:
        """Return the current values of all counters. Wait for the device if it counts tokens."""
        return _CounterValues(self._laps.seconds, self._laps.waited, self._laps.num_samples, float(self._tokens))

    def _read_late(self) -> tuple[_CounterValues, bool]:
        """Return the counters' values without waiting for token counts that are still computed on the device.

        If these counts are not ready, return the values of an earlier call.

        Returns:
            The values, and whether they include tokens.
        """
        tokens_now = self._tokens
        if not isinstance(tokens_now, torch.Tensor):
            return self._read_counters(), True
        readings = self._bar_readings
        values_now = _CounterValues(self._laps.seconds, self._laps.waited, self._laps.num_samples)
        if readings.pending is not None:
            earlier_values, earlier_tokens = readings.pending
            if earlier_tokens.is_ready:
                readings.complete = replace(earlier_values, tokens=float(earlier_tokens.read()))
                readings.pending = None
        if readings.pending is None:
            readings.pending = values_now, Readback(tokens_now)
        return (readings.complete, True) if readings.complete.seconds else (values_now, False)

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
            figures["mfu"] = self.flops_per_token * figures["tokens_per_second"] / self._compute_total_peak()
        elif self.flops_per_sample is not None and samples:
            figures["mfu"] = self.flops_per_sample * figures["samples_per_second"] / self._compute_total_peak()
        figures["data_wait"] = (after.waited - before.waited) / seconds
        return figures

    def show_in_bars(self) -> None:
        """Show the recent throughput in all progress bars of `headway.track` in this process."""
        if self.format_rates not in events.get_progress_texts():
            events.get_progress_texts().append(self.format_rates)
            process.release_at_end(self._remove_from_bars)

    def _remove_from_bars(self) -> None:
        """Undo `show_in_bars`."""
        if self.format_rates in events.get_progress_texts():
            events.get_progress_texts().remove(self.format_rates)

    def format_rates(self) -> str:
        """Return one line with samples and tokens per second, `mfu` and the fraction of time spent waiting for data.

        Unknown values are left out. The others are averages over at least the last five seconds.
        """
        reading, is_complete = self._read_late()
        first = self._bar_readings.first
        figures = self._compute_figures(first, reading)
        if is_complete and reading.seconds - first.seconds > _MIN_BAR_SECONDS:
            self._bar_readings.first = reading
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

        Each rank counts its own operations. If several ranks share each sample (under `tp`, `cp` and `pp`), the count is
        multiplied by their number. Operations that all of them repeat count several times. Under `pp`, the count is exact
        only if all stages have equally many FLOPs. In these layouts, the first training batch that the meter sees is not
        counted, because it can include checks of the model.
        """
        self._flop_count.is_requested = True

    @property
    def _ranks_per_sample(self) -> int:
        """Number of ranks that share each sample: above 1 under `tp`, `cp` and `pp`."""
        return self._runtime.world_size // self._step.strategy.data_shard.count

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
        """Return the dtype of the computation: that of mixed precision, or else of the first parameter.

        For fp8 it is bfloat16, in which all operations except the products of converted layers run. The table has no
        peaks for fp8.
        """
        autocast_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}.get(
            self._step.precision.name
        )
        if autocast_dtype is not None:
            return autocast_dtype
        parameters = self._step.prepared.list_parameters()
        return next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)

    def _compute_total_peak(self) -> float:
        """Return the FLOP/s of all ranks' devices, if they have this rank's peak."""
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
