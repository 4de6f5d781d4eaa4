"""Extrapolate a trace of two updates to a third update.

In each of the first updates, the allocator places blocks of memory differently, and reserved memory grows. Therefore
the trace is extended by a third update, whose events repeat those of the second.
"""

from dataclasses import replace

from headway.forecasting.device.memory_events import MemoryEvent
from headway.forecasting.tracing.trace import PhaseStart, Trace

_FIRST_PHASE = "step 1 forward"
_SECOND_PHASE = "step 2 forward"
_THIRD_PHASE = "step 3 forward"
_END = "end"


def add_third_update(trace: Trace) -> Trace:
    """Extend the trace of two updates by a third, whose events repeat those of the second.

    The second update frees memory that the first has allocated, such as the loop's previous outputs. Likewise, the
    third frees the corresponding memory of the second. If the two updates leave different memory allocated, the trace
    is returned unchanged. So is a trace that does not consist of exactly two updates.
    """
    phases = trace.phases
    first_begin, second_begin = phases.get(_FIRST_PHASE), phases.get(_SECOND_PHASE)
    second_end = phases.get(_END, 0)
    if first_begin is None or second_begin is None or not second_end or _THIRD_PHASE in phases:
        return trace
    first = trace.events[first_begin:second_begin]
    second = trace.events[second_begin:second_end]
    after_end = trace.events[second_end:]
    freed_in_second = {event.key for event in second if event.num_bytes < 0}
    kept_by_first = [event for event in first if event.num_bytes > 0 and event.key in freed_in_second]
    kept_by_second = _match_kept_memory(kept_by_first, second)
    if kept_by_second is None:
        return trace

    # Key of an event of the second update -> key of the corresponding event of the third. Allocations get new keys. Where
    # the second update frees memory of the first, the third frees the corresponding memory of the second.
    next_key = max(event.key for event in trace.events) + 1
    third_keys = {event.key: next_key + i for i, event in enumerate(second) if event.num_bytes > 0}
    third_keys |= {
        first_event.key: second_event.key for first_event, second_event in zip(kept_by_first, kept_by_second)
    }
    if not freed_in_second <= third_keys.keys():
        return trace  # the second update frees memory from before the first, which exists only once
    third = [event._replace(key=third_keys[event.key]) for event in second]

    # The frees at the end of the loop now follow the third update, so the second update must not contain them.
    kept_keys = {event.key for event in kept_by_second}
    second_without_end = [event for event in second if event.num_bytes > 0 or event.key not in kept_keys]
    third_begin = second_begin + len(second_without_end)
    phase_starts = [start for start in trace.phase_starts if start.phase != _END]
    for phase, index in trace.phase_starts:
        if phase.startswith("step 2"):
            phase_starts.append(PhaseStart(phase.replace("step 2", "step 3"), third_begin + index - second_begin))
    phase_starts.append(PhaseStart(_END, third_begin + len(third)))
    events = [*trace.events[:second_begin], *second_without_end, *third, *after_end]
    return replace(trace, events=events, phase_starts=phase_starts)


def _match_kept_memory(kept_by_first: list[MemoryEvent], second: list[MemoryEvent]) -> list[MemoryEvent] | None:
    """Return the allocations that the second update does not free, or None if they do not match those of the first.

    Memory that is freed at the end of the trace counts as not freed. It belongs to variables of the traced loop, which
    a longer loop might keep.

    Args:
        kept_by_first: Allocations of the first update that only the second update frees.
        second: Events of the second update.
    """
    end_of_loop = len(second)
    while end_of_loop and second[end_of_loop - 1].num_bytes < 0:
        end_of_loop -= 1
    freed_in_loop = {event.key for event in second[:end_of_loop] if event.num_bytes < 0}
    freed_at_end = {event.key for event in second[end_of_loop:]}
    kept: list[MemoryEvent] = []
    for event in second:
        if event.num_bytes < 0 or event.key in freed_in_loop:
            continue
        # Both updates make their allocations in the same order.
        if len(kept) < len(kept_by_first) and _is_alike(kept_by_first[len(kept)], event):
            kept.append(event)
        elif event.key not in freed_at_end:
            return None
    return kept if len(kept) == len(kept_by_first) else None


def _is_alike(event: MemoryEvent, other: MemoryEvent) -> bool:
    """Whether two events are equal, apart from their keys and source lines."""
    return event._replace(key=other.key, source_line=other.source_line) == other
