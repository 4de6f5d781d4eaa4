"""Compare the events of traces that differ in the number of a model's repeated blocks, without the events' keys.

`make_tokens` describes events without keys, `find_runs` finds the events that one more repetition adds, and
`expand_runs` builds the events of any number of repetitions. Built events have new keys, numbered from 1, so the events
of two traces can be compared.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import takewhile
from typing import Any, NamedTuple

from headway.common.garbage import pause_garbage_collection
from headway.forecasting.device.memory_events import MemoryEvent
from headway.forecasting.tracing.trace import PhaseStart, Trace

_NUM_COMPARED = 24
"""Number of events after an inserted sequence that are compared to find the length of the sequence."""


class _Traits(NamedTuple):
    """Properties of an allocation. Allocations with equal traits cannot be distinguished without their keys.

    Attributes:
        num_bytes: Allocated bytes.
        operation: Operation that allocates them.
        kind: Kind of memory, such as "activations".
        stream: CUDA stream on which they are allocated.
    """

    num_bytes: int
    operation: str
    kind: str
    stream: int

    @classmethod
    def from_event(cls, event: MemoryEvent) -> "_Traits":
        """Return the traits of an allocation, given its event."""
        return cls(event.num_bytes, event.operation, event.kind, event.stream)

    @property
    def without_size(self) -> tuple[Any, ...]:
        """All traits except the bytes."""
        return self[1:]


class EventToken(NamedTuple):
    """Description of an allocation, a free or the start of a phase that can be compared between traces.

    The keys of events differ between traces, so a description contains no key.

    Attributes:
        event: Event with key 0, or None at the start of a phase.
        phase: Name of the phase that starts.
        freed: Traits of the allocation that is freed. None unless the event is a free.
        newest: Position of the freed allocation among the allocations in use with equal traits, counted from the
            newest. None if the position differs between repetitions of the model's blocks.
        oldest: Position of the freed allocation among the allocations in use with equal traits, counted from the
            oldest. None if the position differs between repetitions of the model's blocks.
        growth: Bytes by which the allocation grows with each further repetition of the model's blocks. An example is a
            tensor with the norms of all gradients.
    """

    event: MemoryEvent | None
    phase: str = ""
    freed: _Traits | None = None
    newest: int | None = None
    oldest: int | None = None
    growth: int = 0


@pause_garbage_collection()
def make_tokens(trace: Trace) -> list[EventToken]:
    """Return descriptions of the events and phases of a trace. They contain no keys, so that traces can be compared."""
    begins: dict[int, list[str]] = defaultdict(list)
    for phase, index in trace.phase_starts:
        begins[index].append(phase)
    keys_in_use: dict[_Traits, list[int]] = defaultdict(list)  # oldest allocation first
    traits_by_key: dict[int, _Traits] = {}
    tokens: list[EventToken] = []
    for index, event in enumerate(trace.events):
        tokens += [EventToken(None, phase) for phase in begins[index]]
        keyless = event._replace(key=0)
        if event.num_bytes >= 0:
            traits = _Traits.from_event(event)
            traits_by_key[event.key] = traits
            keys_in_use[traits].append(event.key)
            tokens.append(EventToken(keyless))
            continue
        traits = traits_by_key[event.key]
        oldest = keys_in_use[traits].index(event.key)
        newest = len(keys_in_use[traits]) - 1 - oldest
        tokens.append(EventToken(keyless, freed=traits, newest=newest, oldest=oldest))
        del keys_in_use[traits][oldest]
    return tokens + [EventToken(None, phase) for phase in begins[len(trace.events)]]


def merge_tokens(one: EventToken, other: EventToken) -> EventToken | None:
    """Return one description that fits two events, or None if the events differ.

    A freed allocation has two positions among equal allocations in use: one counted from the newest and one from the
    oldest. If only one position differs, it is None in the merged description. If both differ, the events differ.
    """
    if (one.event, one.phase, one.freed) != (other.event, other.phase, other.freed):
        return None
    newest = one.newest if one.newest == other.newest else None
    oldest = one.oldest if one.oldest == other.oldest else None
    if one.freed is not None and newest is None and oldest is None:
        return None
    return one._replace(newest=newest, oldest=oldest)


def _merge_grown_token(one: EventToken, other: EventToken) -> EventToken | None:
    """Return one description that fits two events which differ only in their bytes, or None if they differ in more.

    The result is also None for allocations of DDP buckets. Buckets have a maximum size, so their bytes do not grow by a
    constant amount.

    Args:
        one: Event description from a trace.
        other: Event description from the trace with one repetition more.
    """
    if one.event is None or other.event is None or one.event.kind == "buckets":
        return None
    size = other.event.num_bytes
    # A free has negative bytes.
    freed = None if one.freed is None else one.freed._replace(num_bytes=-size)
    resized = one._replace(event=one.event._replace(num_bytes=size), freed=freed)
    merged = merge_tokens(resized, other)
    return None if merged is None else merged._replace(growth=size - one.event.num_bytes)


def apply_size(known: EventToken, other: EventToken) -> EventToken | None:
    """Return an event's description, with its bytes replaced by those of the same event at another batch size.

    Return None if the events differ in anything else: operation, kind of memory, or the position of the freed
    allocation.

    Args:
        known: Description that was verified with three traces of one batch.
        other: Description of the corresponding event in the trace of another batch.
    """
    if known.event is None or other.event is None:
        return known if (known.event, known.phase) == (other.event, other.phase) else None
    is_same = (
        (known.event.num_bytes < 0) == (other.event.num_bytes < 0)
        and _Traits.from_event(known.event).without_size == _Traits.from_event(other.event).without_size
        and (known.freed and known.freed.without_size) == (other.freed and other.freed.without_size)
        and (not known.growth or known.event.num_bytes == other.event.num_bytes)
    )
    if not is_same:
        return None
    # Sizes can be equal by chance at one batch size and not at another. Then only one of the two positions agrees.
    merged = merge_tokens(other._replace(newest=known.newest, oldest=known.oldest), other)
    return None if merged is None else merged._replace(growth=known.growth)


class EventRun(NamedTuple):
    """Consecutive event descriptions of a trace, and whether further repetitions of the model's blocks repeat them.

    Attributes:
        tokens: Event descriptions, in order.
        is_repeated: Whether each further repetition of the model's blocks adds the sequence once more.
    """

    tokens: list[EventToken]
    is_repeated: bool = False


@pause_garbage_collection()
def find_runs(short: list[EventToken], long: list[EventToken]) -> list[EventRun] | None:
    """Find the events that one more repetition of the blocks adds to a trace.

    Args:
        short: Event descriptions of a trace.
        long: Event descriptions of the trace with one repetition more.

    Returns:
        All events as a list of sequences, some of which are repeated. None if any added events do not repeat the events
        before them.
    """
    runs: list[EventRun] = []
    common: list[EventToken] = []
    short_index = long_index = 0
    while long_index < len(long):
        is_short_left = short_index < len(short)
        merged = merge_tokens(short[short_index], long[long_index]) if is_short_left else None
        if merged is None:
            added = _find_addition(short[short_index : short_index + _NUM_COMPARED], long, long_index)
            if added is not None:
                runs += [EventRun(common), EventRun(added, is_repeated=True)]
                common = []
                long_index += len(added)
                continue
            merged = _merge_grown_token(short[short_index], long[long_index]) if is_short_left else None
            if merged is None:
                return None
        common.append(merged)
        short_index, long_index = short_index + 1, long_index + 1
    return [*runs, EventRun(common)] if short_index == len(short) else None


def _find_addition(next_tokens: list[EventToken], long: list[EventToken], begin: int) -> list[EventToken] | None:
    """Return the events that one more repetition of the model's blocks adds to a trace at `begin`, or None if none.

    Added events must repeat the events before them. If sequences of several lengths do so, the one after which the most
    events match `next_tokens` is returned. Of several with equally many matches, it is the shortest.

    Args:
        next_tokens: Next event descriptions of the trace with fewer repetitions.
        long: Event descriptions of the trace with one repetition more.
        begin: Index in `long`.
    """
    best: list[EventToken] | None = None
    most_matches = 0
    for size in range(1, min(begin, len(long) - begin) + 1):
        end = begin + size
        num_matches = _count_matches(next_tokens, long[end : end + _NUM_COMPARED])
        if best is not None and num_matches <= most_matches:
            continue
        merged = [merge_tokens(*pair) for pair in zip(long[begin - size : begin], long[begin:end])]
        repeating = [token for token in merged if token is not None]
        if len(repeating) == size:
            best, most_matches = repeating, num_matches
    return best


def _count_matches(tokens: list[EventToken], others: list[EventToken]) -> int:
    """Return the number of pairs of corresponding events at the start of two lists that match."""
    return sum(1 for _ in takewhile(bool, map(merge_tokens, tokens, others)))


class _KeyedEvents(NamedTuple):
    """Events and phases of a trace.

    Attributes:
        events: Events, each with a key that pairs an allocation with its free.
        phase_starts: Starts of the phases, in order.
    """

    events: list[MemoryEvent]
    phase_starts: list[PhaseStart]


@pause_garbage_collection()
def expand_runs(runs: Iterable[EventRun], times: int) -> _KeyedEvents | None:
    """Build the events and phases of a trace from its sequences, with each repeated sequence `times` times in a row.

    Args:
        runs: Event descriptions, split into sequences that are repeated and sequences that are not.
        times: Number of times that each repeated sequence occurs.

    Returns:
        The events and phases, or None if a free has no matching allocation.
    """
    events: list[MemoryEvent] = []
    phase_starts: list[PhaseStart] = []
    keys_in_use: dict[_Traits, list[int]] = defaultdict(list)  # oldest allocation first
    last_key = 0
    for run in runs:
        for token in run.tokens * (times if run.is_repeated else 1):
            event = token.event
            if event is None:
                phase_starts.append(PhaseStart(token.phase, len(events)))
                continue
            # The description has the size with one added repetition, so growth counts from the second added one on.
            size = event.num_bytes + token.growth * (times - 1)
            traits = token.freed or _Traits.from_event(event)
            keys = keys_in_use[traits._replace(num_bytes=abs(size))]
            if token.freed is None:
                last_key += 1
                key = last_key
                keys.append(key)
            else:
                position = -1 - token.newest if token.newest is not None else token.oldest or 0
                if not -len(keys) <= position < len(keys):
                    return None
                key = keys.pop(position)
            events.append(event._replace(key=key, num_bytes=size))
    return _KeyedEvents(events, phase_starts)


def expand_tokens(tokens: list[EventToken]) -> _KeyedEvents | None:
    """Build the events and phases of a trace from its descriptions, without repeating any of them.

    Return None if a free has no matching allocation.
    """
    return expand_runs([EventRun(tokens)], times=1)
