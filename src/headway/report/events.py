"""What is known of each kind of event: its words, its sign on the charts, and how much it matters."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.report.axis import text
from headway.report.data import Event, RunData

MAX_SIGNS = 80
"""Signs of one kind and run on a chart; of more, equally many are left out between those shown."""
MAX_ROWS = 400
"""Rows of the table."""


@dataclass(frozen=True)
class Kind:
    """A kind of event.

    Attributes:
        words: what it is called on the page.
        sign: an SVG path around (0, 0), about 8 units wide.
        tone: "bad", "warn", "good" or "calm".
        has_line: it gets a vertical line; others are a small tick at the foot of the chart.
    """

    words: str
    sign: str
    tone: str = "calm"
    has_line: bool = True


_KINDS = {
    "out_of_memory": Kind("out of memory", "M0-4.6L4.6 0L0 4.6L-4.6 0Z", "bad"),
    "non_finite": Kind(
        "non-finite", "M-4-2.4L-2.4-4L0-1.6L2.4-4L4-2.4L1.6 0L4 2.4L2.4 4L0 1.6L-2.4 4L-4 2.4L-1.6 0Z", "bad"
    ),
    "preempted": Kind("preempted", "M-3.6-3.6H3.6V3.6H-3.6Z", "warn"),
    "restart": Kind("restart", "M-4.3-3.2H4.3L0 4.3Z", "warn"),
    "started_over": Kind("started over", "M-4.3 3.2H4.3L0-4.3Z", "warn"),
    "straggler": Kind("straggler", "M-4.3-3.2H4.3L0 4.3Z", "warn", has_line=False),
    "resumed": Kind("resumed", "M-4.3 3.2H4.3L0-4.3Z", "good"),
    "checkpoint": Kind("checkpoint", "M-1-4H1V4H-1Z", has_line=False),
    "evaluation": Kind("evaluation", "M-3 0H3V1.6H-3Z", has_line=False),
}
_OTHER = "M0-3.4A3.4 3.4 0 1 1-.01-3.4Z"


def kind_of(name: str) -> Kind:
    """What is known of a kind; of an unknown one, its own name."""
    return _KINDS.get(name) or Kind(name.replace("_", " "), _OTHER)


def kinds(runs: Sequence[RunData]) -> dict[str, int]:
    """How often each kind happened, the known ones first."""
    found = Counter(event.kind for run in runs for event in run.events)
    known = [name for name in _KINDS if name in found]
    return {name: found[name] for name in [*known, *(name for name in found if name not in known)]}


def drawn(run: RunData) -> list[Event]:
    """The events that get a sign, at most MAX_SIGNS of a kind."""
    by_kind: dict[str, list[Event]] = {}
    for event in run.events:
        by_kind.setdefault(event.kind, []).append(event)
    found = [event for events in by_kind.values() for event in _thinned(events)]
    return sorted(found, key=lambda event: event.seconds)


def _thinned(events: list[Event]) -> list[Event]:
    if len(events) <= MAX_SIGNS:
        return events
    last = len(events) - 1
    return [events[index * last // (MAX_SIGNS - 1)] for index in range(MAX_SIGNS)]


_EMPTY: tuple[Any, ...] = (None, "", [], {})


def details(values: Mapping[str, Any], most: int = 300) -> str:
    """What came with an event, in one line."""
    parts = [f"{name.replace('_', ' ')} {_shown(name, value)}" for name, value in values.items() if value not in _EMPTY]
    line = ", ".join(parts)
    return line if len(line) <= most else line[: most - 1] + "…"


def _shown(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    is_size = name.endswith("bytes")
    is_time = name.endswith("seconds")
    return text(value, "bytes" if is_size else "seconds" if is_time else "number")


def sentence(event: Event) -> str:
    """An event in words, for the sign's own label."""
    where = f"step {text(event.step)}: " if event.has_step else ""
    more = details(event.details, 160)
    return f"{where}{kind_of(event.kind).words}{', ' + more if more else ''}"
