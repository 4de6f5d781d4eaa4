"""A third update after two traced ones: blocks are placed differently after each of the first few, and reserved memory grows."""

from dataclasses import replace

from headway.forecasting.tracing.events import MemoryEvent
from headway.forecasting.tracing.trace import Trace

_LAST, _END = "step 2 forward", "end"


def _kept(left: list[MemoryEvent], second: list[MemoryEvent]) -> list[MemoryEvent] | None:
    """What the second update asks for and holds beyond its end, as the first has done; None where that is something else.

    When a traced loop ends its variables go, too: what is given back last of all may have been kept.
    """
    last = len(second)
    while last and second[last - 1].num_bytes < 0:
        last -= 1
    gone = {event.key for event in second[:last] if event.num_bytes < 0}
    at_end = {event.key for event in second[last:]}
    kept: list[MemoryEvent] = []
    for event in second:
        if event.num_bytes < 0 or event.key in gone:
            continue
        wanted = left[len(kept)] if len(kept) < len(left) else None
        if wanted is not None and (wanted[1:3], wanted[4:]) == (event[1:3], event[4:]):
            kept.append(event)
        elif event.key not in at_end:
            return None
    return kept if len(kept) == len(left) else None


def with_third_update(traced: Trace) -> Trace:
    """The trace of two updates with a third, whose events are the second's.

    What the second gives back of the first's, such as a loop's old outputs, the third gives back of the second's. Where what the two
    leave behind differs, the trace stays as it is.
    """
    begin, end = traced.phases.get(_LAST), traced.phases.get(_END, 0)
    first = traced.phases.get("step 1 forward")
    if begin is None or first is None or not end or "step 3 forward" in traced.phases:
        return traced
    before, second, beyond = traced.events[first:begin], traced.events[begin:end], traced.events[end:]
    given_back = {event.key for event in second if event.num_bytes < 0}
    left = [event for event in before if event.num_bytes > 0 and event.key in given_back]
    kept = _kept(left, second)
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
