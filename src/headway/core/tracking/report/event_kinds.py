"""Events of runs on charts and in tables: name, sign and color of each kind, details as text, and which events are drawn."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from headway.core.tracking.report.data import PlacedEvent, RunData
from headway.core.tracking.report.number_formats import format_value

MAX_SIGNS = 80
"""Maximum number of event signs of one kind and run on a chart.

If there are more events, evenly spaced ones are shown.
"""
_CIRCLE = "M0-3.4A3.4 3.4 0 1 1-.01-3.4Z"
"""SVG path of the sign for kinds of events that have no sign of their own."""
_TRACKER_EXPLANATION = "A tracker has opened its run. By the identity, a resumed training continues it."
_EMPTY: tuple[Any, ...] = (None, "", [], {})
"""Details of events that are not shown."""


@dataclass(frozen=True)
class EventKind:
    """Presentation of a kind of event on charts and in tables.

    Attributes:
        label: Name on the page.
        sign: SVG path of the event's sign, centered at (0, 0) and about 8 units wide.
        tone: "bad", "warn", "good" or "calm". It determines the color.
        has_line: Whether the event is drawn as a vertical line. Otherwise it has a short mark at the bottom of the
            chart.
        explanation: Text that is shown when the pointer rests on the name; may be empty.
    """

    label: str
    sign: str
    tone: str = "calm"
    has_line: bool = True
    explanation: str = ""


_KINDS = {
    "out_of_memory": EventKind("out of memory", "M0-4.6L4.6 0L0 4.6L-4.6 0Z", "bad"),
    "non_finite": EventKind(
        "non-finite", "M-4-2.4L-2.4-4L0-1.6L2.4-4L4-2.4L1.6 0L4 2.4L2.4 4L0 1.6L-2.4 4L-4 2.4L-1.6 0Z", "bad"
    ),
    "preempted": EventKind("preempted", "M-3.6-3.6H3.6V3.6H-3.6Z", "warn"),
    "restart": EventKind("restart", "M-4.3-3.2H4.3L0 4.3Z", "warn"),
    "started_over": EventKind("started over", "M-4.3 3.2H4.3L0-4.3Z", "warn"),
    "skipped_update": EventKind("skipped by fp16", "M-4.3 0L0-4.3L4.3 0", "warn", has_line=False),
    "straggler": EventKind("straggler", "M-4.3-3.2H4.3L0 4.3Z", "warn", has_line=False),
    "resumed": EventKind("resumed", "M-4.3 3.2H4.3L0-4.3Z", "good"),
    "checkpoint": EventKind("checkpoint", "M-1-4H1V4H-1Z", has_line=False),
    "evaluation": EventKind("evaluation", "M-3 0H3V1.6H-3Z", has_line=False),
    "tracker": EventKind("tracker connected", _CIRCLE, has_line=False, explanation=_TRACKER_EXPLANATION),
    "tracker_failed": EventKind("tracker failed", _CIRCLE, "warn", has_line=False),
    "tracker_dropped": EventKind("tracker dropped", _CIRCLE, "warn", has_line=False),
}
"""Presentation of the kinds of events that Headway logs, in the order in which a page lists them."""


def find_event_kind(name: str) -> EventKind:
    """Return the presentation of a kind of event. Unknown kinds get a neutral sign, and their own name as text."""
    return _KINDS.get(name) or EventKind(name.replace("_", " "), _CIRCLE)


def render_hint(kind: EventKind) -> str:
    """Return an HTML attribute that shows the explanation of a kind of event, or "" if there is none."""
    return f' title="{escape(kind.explanation, quote=True)}"' if kind.explanation else ""


def count_kinds(runs: Sequence[RunData]) -> dict[str, int]:
    """Return the number of events by kind, over all runs. Kinds with their own sign come first."""
    counts = Counter(event.kind for run in runs for event in run.events)
    known = [name for name in _KINDS if name in counts]
    unknown = [name for name in counts if name not in _KINDS]
    return {name: counts[name] for name in [*known, *unknown]}


def select_drawn_events(run: RunData) -> list[PlacedEvent]:
    """Return the events of a run that are drawn on charts: at most `MAX_SIGNS` of each kind."""
    by_kind: dict[str, list[PlacedEvent]] = {}
    for event in run.events:
        by_kind.setdefault(event.kind, []).append(event)
    drawn = [event for events in by_kind.values() for event in _select_evenly(events)]
    return sorted(drawn, key=lambda event: event.seconds)


def _select_evenly(events: list[PlacedEvent]) -> list[PlacedEvent]:
    """Return at most `MAX_SIGNS` evenly spaced events, with the first and the last one."""
    if len(events) <= MAX_SIGNS:
        return events
    last = len(events) - 1
    return [events[index * last // (MAX_SIGNS - 1)] for index in range(MAX_SIGNS)]


def format_details(values: Mapping[str, Any], max_length: int = 300) -> str:
    """Return the details of an event in one line of text.

    Args:
        values: Details by name. Empty values are left out.
        max_length: Maximum number of characters, after which the line is cut off. Default: 300.
    """
    parts = [
        _format_detail(name, value) if name == "reason" else f"{_format_name(name)} {_format_detail(name, value)}"
        for name, value in values.items()
        if value not in _EMPTY
    ]
    line = ", ".join(parts)
    return line if len(line) <= max_length else line[: max_length - 1] + "…"


def _format_name(name: str) -> str:
    """Return the name of a detail as words. The unit "seconds" is left out, because the value shows it."""
    return name.removesuffix("_seconds").replace("_", " ")


def _format_detail(name: str, value: Any) -> str:
    """Return one detail of an event as text. Lists and mappings are formatted recursively.

    Args:
        name: Name of the detail. Names that end in "bytes" or "seconds" determine the unit.
        value: Value of the detail.
    """
    if isinstance(value, list):
        return "; ".join(_format_detail(name, each) for each in value)
    if isinstance(value, Mapping):
        text = ", ".join(f"{_format_name(key)} {_format_detail(key, each)}" for key, each in value.items())
        return text if len(value) == 1 else f"({text})"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if name.endswith("bytes"):
        return format_value(value, "bytes")
    if name.endswith("seconds"):
        return format_value(value, "seconds")
    return format_value(value)


def describe_event(event: PlacedEvent) -> str:
    """Return one line of text about an event, for the label of its sign."""
    step = f"step {format_value(event.step)}: " if event.has_step else ""
    details = format_details(event.details, 160)
    return f"{step}{find_event_kind(event.kind).label}{', ' + details if details else ''}"


def render_sign(kind: EventKind) -> str:
    """Return the sign of a kind of event as SVG."""
    return f'<svg viewBox="-6 -6 12 12" aria-hidden="true"><path class="sign" d="{kind.sign}"/></svg>'
