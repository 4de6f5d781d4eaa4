"""Run torch's profiler over a code block, and write a trace and a table per rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from headway.core.config.torch_kwargs import ProfileKwargs
from headway.errors import ConfigError
from headway.extras._torch import get_privateuse1_backend_name
from headway.log import get_logger

log = get_logger(__name__)

_NUM_ROWS = 50
"""Number of rows of the table that is written for each rank."""


@contextmanager
def profile_block(options: ProfileKwargs, rank: int) -> Iterator[torch.profiler.profile]:
    """Return a context that profiles the code inside it, and yields torch's profiler.

    If `output_trace_dir` is set, `profile_<rank>.json` (a trace) and `profile_<rank>.txt` (a table) are written there
    at the end, even if the code raises an error. If nothing was recorded, a warning is logged instead.

    Args:
        options: Settings of torch's profiler.
        rank: Rank of this process, for the file names.

    Raises:
        ConfigError: If an activity is unknown.
    """
    known_activities = _list_activities()
    unknown = set(options.activities or ()) - set(known_activities)
    if unknown:
        raise ConfigError(f"unknown profiler activities {sorted(unknown)}; allowed: {', '.join(known_activities)}")
    profiler = torch.profiler.profile(
        activities=[known_activities[name] for name in options.activities] if options.activities else None,
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
            _export_trace(profiler, folder / f"profile_{rank}.json")


def _list_activities() -> dict[str, torch.profiler.ProfilerActivity]:
    """Return torch's profiler activities by lowercase name.

    The activity of another vendor's device has the name under which the vendor's package registered the device.
    """
    activities = torch.profiler.ProfilerActivity
    by_name = {name.lower(): activity for name, activity in activities.__members__.items()}
    return {**by_name, get_privateuse1_backend_name(): activities.PrivateUse1}


def _export_trace(profiler: torch.profiler.profile, path: Path) -> None:
    """Write the trace to `path`, and a table of the operations to a `.txt` file next to it. Failures are only logged."""
    try:
        profiler.export_chrome_trace(str(path))
        averages = profiler.key_averages()
        on_device = any(average.self_device_time_total for average in averages)
        order = "self_cuda_time_total" if on_device else "self_cpu_time_total"  # torch uses "cuda" for any device
        path.with_suffix(".txt").write_text(averages.table(sort_by=order, row_limit=_NUM_ROWS))
    except (AssertionError, RuntimeError) as error:
        # The block ended before the schedule recorded anything; its own error, if any, must not be replaced.
        log.warning("no profile in %s: nothing was recorded (%s)", path, error, main_process_only=False)
