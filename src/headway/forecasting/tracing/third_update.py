"""Extrapolate a trace of two updates to a third update.

In each of the first updates, the allocator places blocks of memory differently, and reserved memory grows. Therefore
the trace is extended by a third update, whose events repeat those of the second.
"""

from dataclasses import replace

from headway.forecasting.device.allocator import MemoryEvent
from headway.forecasting.tracing.trace import Trace

_FIRST_PHASE = "step 1 forward"
_SECOND_PHASE = "step 2 forward"
_THIRD_PHASE = "step 3 forward"
_END = "end"


def _find_kept(left_over: list[MemoryEvent], second: list[MemoryEvent]) -> list[MemoryEvent] | None:
    """Return the allocations that the second update does not free, or None if they do not match those of the first.

    Memory that is freed at the end of the trace counts as not freed. It belongs to variables of the traced loop, which
    a longer loop might keep.

    Args:
        left_over: Allocations of the first update that the second update frees.
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
        if len(kept) < len(left_over) and _is_alike(left_over[len(kept)], event):
            kept.append(event)
        elif event.key not in freed_at_end:
            return None
    return kept if len(kept) == len(left_over) else None


def _is_alike(event: MemoryEvent, other: MemoryEvent) -> bool:
    """Whether two events are equal, apart from their keys and source lines."""
    return event._replace(key=other.key, source_line=other.source_line) == other


def add_third_update(traced: Trace) -> Trace:
    """Extend the trace of two updates by a third, whose events repeat those of the second.

    The second update frees memory that the first has allocated, such as the loop's previous outputs. Likewise, the
    third frees the corresponding memory of the second. If the two updates leave different memory allocated, the trace
    is returned unchanged. So is a trace that does not consist of exactly two updates.
    """
    first_begin, second_begin = traced.phases.get(_FIRST_PHASE), traced.phases.get(_SECOND_PHASE)
    second_end = traced.phases.get(_END, 0)
    if first_begin is None or second_begin is None or not second_end or _THIRD_PHASE in traced.phases:
        return traced
    first = traced.events[first_begin:second_begin]
    second = traced.events[second_begin:second_end]
    after_end = traced.events[second_end:]
    freed_in_second = {event.key for event in second if event.num_bytes < 0}
    left_over = [event for event in first if event.num_bytes > 0 and event.key in freed_in_second]
    kept = _find_kept(left_over, second)
    if kept is None:
        return traced

    # Allocations of the third update get new keys. Its frees of older memory apply to what the second update has kept.
    next_key = max(event.key for event in traced.events) + 1
    third_keys = {event.key: next_key + i for i, event in enumerate(second) if event.num_bytes > 0}
    third_keys |= {first_event.key: second_event.key for first_event, second_event in zip(left_over, kept)}
    if not freed_in_second <= third_keys.keys():
        return traced
    third = [event._replace(key=third_keys[event.key]) for event in second]

    # The frees at the end of the loop now follow the third update, so the second update must not contain them.
    kept_keys = {event.key for event in kept}
    second_without_end = [event for event in second if event.num_bytes > 0 or event.key not in kept_keys]
    third_begin = second_begin + len(second_without_end)
    phases = {name: index for name, index in traced.phases.items() if name != _END}
    for name, index in traced.phases.items():
        if name.startswith("step 2"):
            phases[name.replace("step 2", "step 3")] = third_begin + index - second_begin
    phases[_END] = third_begin + len(third)
    events = [*traced.events[:second_begin], *second_without_end, *third, *after_end]
    return replace(traced, events=events, phases=phases)
