"""The Accelerator's methods about measuring: profile, throughput, and the guard against non-finite values."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from headway.config.strategies import ProfileKwargs
from headway.training.finite import FiniteGuard
from headway.training.profile import profiling
from headway.training.throughput import Throughput

if TYPE_CHECKING:
    from headway.config.strategies import EngineOptions
    from headway.runtime.process import ProcessRuntime
    from headway.training.accumulation import Accumulation
    from headway.training.clock import Clock
    from headway.training.prepare import Preparation


class Measuring:
    """The part of the Accelerator that measures."""

    if TYPE_CHECKING:
        options: EngineOptions
        runtime: ProcessRuntime
        clock: Clock
        _accumulation: Accumulation
        _preparation: Preparation

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """torch's profiler around the block; traces and a table go to `output_trace_dir`, one file a rank."""
        return profiling(profile_handler or self.options.profile, self.runtime.rank)

    @property
    def throughput(self) -> Throughput:
        """Measures the loop from its first use on: ask for it before the loop (docs/throughput.md)."""
        meter = self._accumulation.meter
        if meter is None:
            meter = self._accumulation.meter = Throughput(self._accumulation, self.clock, self.runtime)
            for loader in self._preparation.loaders:
                loader.meter = meter
        return meter

    @property
    def non_finite(self) -> FiniteGuard | None:
        """What `on_non_finite` has done so far; None where it was not asked for."""
        return self._accumulation.guard
