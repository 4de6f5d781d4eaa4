"""torch's profiler around a block, with a trace and a table per rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from headway.config.engines import ProfileKwargs
from headway.errors import ConfigError
from headway.log import get_logger

log = get_logger(__name__)

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
