"""Extrapolate a trace of two updates to a third update.

In each of the first updates, the allocator places blocks of memory differently, and reserved memory grows. Therefore
the trace is extended by a third update, whose events repeat those of the second.
"""

from dataclasses import replace

from headway.forecasting.device.allocator import MemoryEvent
from headway.forecasting.tracing.trace import Trace

_LAST = "step 2 forward"
_END = "end"


def _find_kept(left: list[MemoryEvent], second: list[MemoryEvent]) -> list[MemoryEvent] | None:
    """Return the allocations that the second update does not free, or None if they do not match those of the first.

    Memory that is freed at the end of the trace counts as not freed. It belongs to variables of the traced loop, which
    a longer loop might keep.

    Args:
        left: Allocations of the first update that the second update frees.
        second: Events of the second update.
    """
    last = len(second)
    while last and second[last - 1].num_bytes < 0:
        last -= 1
    freed = {event.key for event in second[:last] if event.num_bytes < 0}
    at_end = {event.key for event in second[last:]}
    kept: list[MemoryEvent] = []
    for event in second:
        if event.num_bytes < 0 or event.key in freed:
            continue
        wanted = left[len(kept)] if len(kept) < len(left) else None
        if wanted is not None and (wanted[1:3], wanted[4:]) == (event[1:3], event[4:]):
            kept.append(event)
        elif event.key not in at_end:
            return None
    return kept if len(kept) == len(left) else None


def add_third_update(traced: Trace) -> Trace:
    """Extend the trace of two updates by a third, whose events repeat those of the second.

    The second update frees memory that the first has allocated, such as the loop's previous outputs. Likewise, the
    third frees the corresponding memory of the second. If the two updates leave different memory allocated, the trace
    is returned unchanged. So is a trace that does not consist of exactly two updates.
    """
    begin, end = traced.phases.get(_LAST), traced.phases.get(_END, 0)
    first = traced.phases.get("step 1 forward")
    if begin is None or first is None or not end or "step 3 forward" in traced.phases:
        return traced
    before, second, beyond = traced.events[first:begin], traced.events[begin:end], traced.events[end:]
    given_back = {event.key for event in second if event.num_bytes < 0}
    left = [event for event in before if event.num_bytes > 0 and event.key in given_back]
    kept = _find_kept(left, second)
    if kept is None:
        return traced
    next_key = max(event.key for event in traced.events) + 1
    keys = {event.key: next_key + i for i, event in enumerate(second) if event.num_bytes > 0}
    keys |= {old.key: new.key for old, new in zip(left, kept)}
    if not given_back <= keys.keys():
        return traced
    stays = {event.key for event in kept}
    now = [event for event in second if event.num_bytes > 0 or event.key not in stays]
    third = [MemoryEvent(keys[event.key], *event[1:]) for event in second]
    end -= len(second) - len(now)
    phases = {
        name.replace("step 2", "step 3"): index - begin + end
        for name, index in traced.phases.items()
        if name.startswith("step 2")
    }
    ended = {name: index for name, index in traced.phases.items() if name != _END}
    events = [*traced.events[:begin], *now, *third, *beyond]
    return replace(traced, events=events, phases={**ended, **phases, _END: end + len(third)})
