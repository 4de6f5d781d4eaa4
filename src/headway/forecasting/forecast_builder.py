"""Turn a trace into a forecast: replay its allocations on the target device, and add margins, totals and a timeline."""

from headway.common.garbage import pause_garbage_collection
from headway.core.training.forecast_types import Forecast, Timeline
from headway.forecasting.device.allocator import AllocationReplay, replay_events
from headway.forecasting.device.devices import Device, estimate_use
from headway.forecasting.device.memory_events import KINDS, MemoryEvent, compute_exact_peak, split_by_kind
from headway.forecasting.tracing.trace import PhaseStart, Trace

POINTS = 400
"""Maximum number of points of a memory timeline."""


def build_timeline(events: list[MemoryEvent], phase_starts: list[PhaseStart], points: int = POINTS) -> Timeline:
    """Build the timeline of a trace: the bytes in use over the course of the step, by kind of memory.

    If there are more events than points, each point shows the highest total of a range of consecutive events.

    Args:
        events: Allocation events in order, with their kinds.
        phase_starts: Starts of the phases, in order.
        points: Maximum number of points.
    """
    events_per_point = max(1, -(-len(events) // points))
    bytes_by_kind = dict.fromkeys(KINDS, 0)
    total, highest_total, highest_index = 0, -1, 0
    highest_sizes: tuple[int, ...] = ()
    indices: list[int] = []
    rows: list[tuple[int, ...]] = []
    for index, event in enumerate(events):
        bytes_by_kind[event.kind] += event.num_bytes
        total += event.num_bytes
        if total > highest_total:
            highest_total, highest_index, highest_sizes = total, index, tuple(bytes_by_kind.values())
        if (index + 1) % events_per_point == 0 or index == len(events) - 1:
            indices.append(highest_index)
            rows.append(highest_sizes)
            highest_total = -1
    columns = dict(zip(KINDS, zip(*rows))) if rows else {}
    sizes = {kind: column for kind, column in columns.items() if any(column)}
    return Timeline(tuple(indices), sizes, tuple((phase, index) for phase, index in phase_starts))


@pause_garbage_collection()
def build_forecast(trace: Trace, target: Device, batch_size: int, limit: int | None, is_expandable: bool) -> Forecast:
    """Build the memory forecast for the batch size of a trace.

    Args:
        trace: Trace of at least two training steps.
        target: Device to forecast for.
        batch_size: Samples per micro-batch in the trace.
        limit: Bytes that the whole process may use, or None if unknown.
        is_expandable: Whether the allocator uses `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.
    """
    events = trace.events
    replay = replay_on_device(events, target, is_expandable)
    least, total, most = estimate_use(target, replay.reserved)
    most += trace.unsure_bytes
    return Forecast(
        device=target.name,
        batch_size=batch_size,
        allocated=replay.allocated,
        reserved=replay.reserved,
        least=least,
        total=total,
        most=most,
        split=split_by_kind(events, replay.peak_index),
        peak=_find_phase(trace.phase_starts, replay.peak_index),
        peak_line=events[replay.peak_index].source_line,
        budget=limit,
        fits=None if limit is None else _judge_fit(least, most, limit),
        timeline=build_timeline(events, trace.phase_starts),
        caveats=(*trace.caveats, *target.caveats),
    )


def replay_on_device(events: list[MemoryEvent], device: Device, is_expandable: bool) -> AllocationReplay:
    """Replay allocation events by the rules of the device's allocator, and return the peak memory.

    For a CPU, allocated and reserved memory are equal: the exact peak of the bytes in use.

    Args:
        events: Events in order.
        device: Device to forecast for.
        is_expandable: Whether the allocator of a CUDA device uses expandable segments.
    """
    replay = replay_events(events, expandable=is_expandable)
    if device.is_cuda:
        return replay
    exact = compute_exact_peak(events)  # a CPU's allocator neither rounds requests nor caches freed memory
    return AllocationReplay(allocated=exact, reserved=exact, peak_index=replay.peak_index)


def _judge_fit(least: int, most: int, budget: int) -> bool | None:
    """Return whether the memory fits into the budget, or None if that is uncertain.

    Args:
        least: Lower bound of the memory in bytes. If it exceeds the budget, the result is False.
        most: Upper bound of the memory in bytes. If it is within the budget, the result is True.
        budget: Available bytes.
    """
    if most <= budget:
        return True
    return False if least > budget else None


def _find_phase(phase_starts: list[PhaseStart], index: int) -> str:
    """Return the phase to which the event with this index belongs: the last phase that starts at or before it."""
    return [start.phase for start in phase_starts if start.event_index <= index][-1]
