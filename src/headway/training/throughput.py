"""Throughput: samples, tokens and FLOPs a second, the share of time spent waiting for data; and torch's profiler.

The loader and backward tell the moments; nothing is exchanged between ranks and nothing waits for a device::

    fetch ------ fetched ------- backward ---- ... step, logging ... ---- fetch
      | waiting for data | forward |                                       |
      +----------------- a lap, counted if a backward came ----------------+

Passes without a backward (evaluation) belong to no lap. On an accelerator the host runs ahead of the device, so rates are
right over many steps, and waiting for data counts also where the device still has work: an upper bound.

Peak FLOP/s of a device: what its maker states for dense matrix products, or what a product on it reaches.

What makers state is in `forecasting/device/devices.py`. A kind that is not in the table, such as any CPU, is measured: the fastest of
several products of square matrices, which is a lower bound of its peak. Shares of it are comparable on one machine only, and
`Peak.source` says so.

torch's profiler around a block, with a trace and a table per rank.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from headway.config.engines import ProfileKwargs
from headway.data.loader import LoaderEvents, PreparedLoader
from headway.errors import ConfigError
from headway.forecasting.device.devices import DATA_SHEETS
from headway.log import get_logger
from headway.runtime import events, process
from headway.runtime.device import HARDWARE
from headway.runtime.process import ProcessRuntime
from headway.runtime.transfers import Readback
from headway.training.step import TrainingStep
from headway.training.stragglers import RankPace, RankPaces, find_stragglers
from headway.training.windows import UpdateClock


@dataclass(frozen=True)
class Peak:
    """The most a device computes.

    Attributes:
        flops_per_second: of one device.
        source: "stated" with the table's name of the device, "measured", or "given".
    """

    flops_per_second: float
    source: str


_COLUMNS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 3}
_TF32 = 2


def stated(name: str, dtype: torch.dtype, uses_tf32: bool = False) -> Peak | None:
    """What the table says of a device with this name; None where it is not in it, or has no units for the type.

    Args:
        name: as the driver gives it, "NVIDIA H100 80GB HBM3" say.
        dtype: of the matrix products.
        uses_tf32: float32 products run in TF32.
    """
    words = f" {name} ".replace("-", " ")
    for known, figures in DATA_SHEETS.items():
        # Whole words: an "L4" is no "L40", and an "A30" no "A300".
        if f" {known.replace('-', ' ')} " in words:
            column = _TF32 if dtype == torch.float32 and uses_tf32 and figures[_TF32] else _COLUMNS.get(dtype)
            found = None if column is None else figures[column]
            return None if found is None else Peak(found * 1e12, f"stated for {known}")
    return None


def measured(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> Peak:
    """The fastest of several products of square matrices on the device, within about `seconds`."""
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
    return Peak(2.0 * size**3 / best, "measured")


def peak_of(device: torch.device, dtype: torch.dtype) -> Peak:
    """The device's peak for products of this type: stated where it is in the table, else measured."""
    tell = None if device.type == "cpu" else HARDWARE[device.type].ability("get_device_name")
    if tell is not None:
        uses_tf32 = torch.get_float32_matmul_precision() != "highest" or torch.backends.cuda.matmul.allow_tf32
        found = stated(tell(device), dtype, uses_tf32)
        if found is not None:
            return found
    return measured(device, dtype)


log = get_logger(__name__)


@dataclass(frozen=True)
class _Reading:
    """The counters at a moment."""

    seconds: float = 0.0
    waited: float = 0.0
    samples: float = 0.0
    tokens: float = 0.0


class Throughput:
    """Measures the training loop from its creation on; `accelerator.throughput` makes it.

    Example::

        throughput = accelerator.throughput
        throughput.count_flops()
        for step, (inputs, targets) in enumerate(loader):
            ...
            throughput.add(tokens=inputs.numel())
            if step % 100 == 99:
                accelerator.log(throughput.values(), step=step)

    Args:
        step, clock, runtime: the Accelerator's.
        events: of its loaders.
        now: the clock to read, in seconds.

    Attributes:
        every: updates between two words of each rank about its pace.
        factor: a rank is a straggler if its forward takes so many times the median.
        flops_per_sample, flops_per_token: of forward and backward, for "mfu"; None: unknown. 6 x parameters is a
            usual estimate for a token of a transformer without recomputation (Kaplan et al. 2020, section 2.1).
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
        self._peak: Peak | None = None
        # the lap
        self._reader: PreparedLoader | None = None
        self._asked = self._came = self._began = 0.0
        self._is_open = self._is_there = False
        # the counters
        self._seconds = self._waited = self._samples = 0.0
        self._tokens: float | torch.Tensor = 0.0
        self._has_tokens = False
        self._last = self._shown = _Reading()
        self._asked_for: tuple[_Reading, Readback] | None = None
        self._late = _Reading()
        # FLOPs
        self._is_armed = False
        self._is_spoilt = False
        self._counter: Any = None
        self._event: Any = None
        self._paces = RankPaces(runtime, clock.num_updates)
        events.asked.append(self._on_fetch)
        events.came.append(self._on_batch)
        events.left.append(self._on_pass_end)
        step.moments.before_backward.append(self._on_backward)

    # ---------------------------------------------------------------- moments

    def _on_fetch(self, loader: PreparedLoader) -> None:
        """A batch is asked for: the lap before ends."""
        now = self._now()
        self._end_lap(now)
        self._reader, self._asked, self._is_there = loader, now, False
        if self._paces.is_due(self._clock.num_updates, self.every):
            self._paces.tell(self._clock.num_updates, self.seconds, self._waited, self.factor)
            self._asked = self._now()

    def _on_batch(self, loader: PreparedLoader) -> None:
        """It has come."""
        self._came, self._is_there = self._now(), True
        if self._is_armed:
            from torch.utils.flop_counter import FlopCounterMode

            self._is_armed = False
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()
        if self._runtime.device.type != "cpu":
            self._event = self._record_event()

    def _on_pass_end(self) -> None:
        """A pass is over, or was broken off."""
        self._end_lap(self._now())
        self._is_there = False

    def _on_backward(self) -> None:
        """The first backward of a batch makes its lap count."""
        if self._is_open and self._is_there:
            return
        now, active = self._now(), self._active
        if self._is_open:
            self._end_lap(now)
        self._is_open = True
        if not self._is_there or not active or active[-1] is not self._reader:
            self._began = now  # a batch of the caller's own: from here to the next backward
            return
        self._began = self._asked
        self._waited += self._came - self._asked
        self._samples += self._reader.num_consumed - self._reader.num_consumed_before
        if not self._paces.is_full:
            self._paces.add(now - self._came if self._event is None else (self._event, self._record_event()))

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
        """Leave the block's time out: such as a save, or an evaluation without a prepared loader."""
        was_open, begun = self._is_open, self._now()
        self._end_lap(begun)
        try:
            yield
        finally:
            now = self._now()
            self._asked += now - begun  # where the lap is not counted yet, it begins so much later
            self._came += now - begun
            self._began, self._is_open = now, was_open

    def add(self, tokens: float | torch.Tensor) -> None:
        """Count tokens of this rank; a tensor on an accelerator is added there and read with the values."""
        self._has_tokens = True
        self._tokens = self._tokens + (tokens.detach() if isinstance(tokens, torch.Tensor) else tokens)

    # ---------------------------------------------------------------- figures

    def values(self) -> dict[str, float]:
        """What happened since the last call, by the names of a run's log; without what is not known.

        `samples_per_second` and `tokens_per_second` are of all data ranks together (tokens: this rank's times their
        number), `data_wait` is this rank's share of its time, 0 to 1, and `mfu` what all ranks computed by the
        model's FLOPs over their peak. Empty where no lap was done.
        """
        reading = self._read()
        found = self._compute_figures(self._last, reading)
        if found:
            self._last = reading
        return found

    def total(self) -> dict[str, float]:
        """The same since the measuring began."""
        return self._compute_figures(_Reading(), self._read())

    @property
    def seconds(self) -> float:
        """Time in laps so far."""
        return self._seconds + (self._now() - self._began if self._is_open else 0.0)

    def _read(self) -> _Reading:
        return _Reading(self.seconds, self._waited, self._samples, float(self._tokens) if self._has_tokens else 0.0)

    def _read_late(self) -> tuple[_Reading, bool]:
        """(the same, whether tokens are in it): tokens that a device has counted are waited for by nobody.

        They are as of the call before, or of an earlier one, and so is the rest of the reading.
        """
        if not isinstance(self._tokens, torch.Tensor) or self._tokens.device.type == "cpu":
            return self._read(), True
        now = _Reading(self.seconds, self._waited, self._samples)
        asked = self._asked_for
        if asked is not None and asked[1].is_there:
            self._late = replace(asked[0], tokens=float(asked[1].read()))
            asked = None
        if asked is None:
            self._asked_for = now, Readback(self._tokens)
        return (self._late, True) if self._late.seconds else (now, False)

    def _compute_figures(self, before: _Reading, after: _Reading) -> dict[str, float]:
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
        """Let every bar of `headway.track` tell the figures of the last seconds, in this process."""
        if self.fact not in events.facts():
            events.facts().append(self.fact)
            process.at_end(self._remove_from_bars)

    def _remove_from_bars(self) -> None:
        if self.fact in events.facts():
            events.facts().remove(self.fact)

    def fact(self) -> str:
        """One line: samples and tokens a second, the share of waiting for data, of the last five seconds or more."""
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
        """Count the FLOPs of the next batch of a prepared loader, forward and backward, and take it for a usual one.

        By torch.utils.flop_counter: products of matrices, convolutions and attention, also those that activation
        checkpointing computes again (give `flops_per_sample` where these should not count). That one batch is slower.
        """
        self._is_armed = True

    def _finish_counting(self) -> None:
        counter = self._counter
        assert counter is not None
        if _get_current_dispatch_mode() is not counter.mode:
            self._is_spoilt = (
                True  # in a mode of the caller's own, which has to end first: other batches are counted too
            )
            return
        self._counter = None
        counter.__exit__(None, None, None)
        rows = None if self._reader is None else self._reader.num_rows
        if self._is_spoilt or not self._is_open or not rows:  # such as an evaluation's batch: the next one
            self._is_armed, self._is_spoilt = True, False
        elif counter.get_total_flops():
            self.flops_per_sample = counter.get_total_flops() / rows
            log.info("%.4g FLOPs a sample, counted on a batch of %d", self.flops_per_sample, rows)

    @property
    def peak(self) -> Peak:
        """What one device computes at most, in the precision of the run; settable (FLOP/s) where the table is wrong."""
        if self._peak is None:
            self._peak = peak_of(self._runtime.device, self._find_dtype())
            log.info(
                "peak of %s: %.4g FLOP/s (%s)", self._runtime.device, self._peak.flops_per_second, self._peak.source
            )
        return self._peak

    @peak.setter
    def peak(self, flops_per_second: "float | Peak") -> None:
        given = flops_per_second if isinstance(flops_per_second, Peak) else Peak(float(flops_per_second), "given")
        if not given.flops_per_second > 0:
            raise ConfigError(f"peak={given.flops_per_second!r} must be a number of FLOP/s above 0")
        self._peak = given

    def _find_dtype(self) -> torch.dtype:
        found = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self._step.precision.name)
        if found is not None:
            return found
        parameters = self._step.prepared.all_parameters()
        return next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)

    def _sum_peaks(self) -> float:
        return self.peak.flops_per_second * self._runtime.world_size

    # ---------------------------------------------------------------- paces

    def paces(self) -> list[RankPace]:
        """What each rank told last, every `every` updates, over the control plane; no rank waits for another here."""
        return self._paces.latest()

    def stragglers(self) -> dict[int, str]:
        """{rank: in what it is slower than the others}, of what ranks told last."""
        return find_stragglers(self._paces.latest(), self.factor)


_NUM_ROWS = 50


@contextmanager
def profiling(options: ProfileKwargs, rank: int) -> Iterator[torch.profiler.profile]:
    """Profile the block; the trace is written also where the block raises.

    Raises:
        ConfigError: an unknown activity.
    """
    known = _activities()
    unknown = set(options.activities or ()) - set(known)
    if unknown:
        raise ConfigError(f"unknown profiler activities {sorted(unknown)}; allowed: {', '.join(known)}")
    profiler = torch.profiler.profile(
        activities=[known[name] for name in options.activities] if options.activities else None,
        schedule=torch.profiler.schedule(**options.schedule_option) if options.schedule_option else None,
        on_trace_ready=options.on_trace_ready,
        record_shapes=options.record_shapes,
        profile_memory=options.profile_memory,
        with_stack=options.with_stack,
        with_flops=options.with_flops,
        with_modules=options.with_modules,
    )
    try:
        with profiler:
            yield profiler
    finally:
        if options.output_trace_dir is not None:
            folder = Path(options.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            _export(profiler, folder / f"profile_{rank}.json")


def _activities() -> dict[str, torch.profiler.ProfilerActivity]:
    """torch's activities by the kind of device; a vendor's own goes by the name that its package registered."""
    activities = torch.profiler.ProfilerActivity
    known = {name.lower(): activity for name, activity in activities.__members__.items()}
    return {**known, torch._C._get_privateuse1_backend_name(): activities.PrivateUse1}


def _export(profiler: torch.profiler.profile, path: Path) -> None:
    try:
        profiler.export_chrome_trace(str(path))
        averages = profiler.key_averages()
        on_device = any(average.self_device_time_total for average in averages)
        order = "self_cuda_time_total" if on_device else "self_cpu_time_total"  # "cuda" stands for any device
        path.with_suffix(".txt").write_text(averages.table(sort_by=order, row_limit=_NUM_ROWS))
    except (AssertionError, RuntimeError) as error:
        # The block ended before the schedule recorded anything; its own error, if any, must stay the one seen.
        log.warning("no profile in %s: nothing was recorded (%s)", path, error, main_process_only=False)
