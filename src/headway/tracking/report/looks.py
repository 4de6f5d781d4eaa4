"""How things look on the page: the colours of lines, the signs and words of events, the marks of values that are not finite.

The colours can be told apart with any colour vision, on a light and on a dark page. They were found by a search over lightness,
chroma and hue within each hue's range: it maximises the least distance (in Oklab) of any two as seen by people with normal, red-,
green- and blue-blind vision (simulated after Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of
Color Vision Deficiency", 2009), the first four weighing most, with a contrast of 3:1 or more to the page. A test holds the numbers.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.tracking.report.data import PlacedEvent, RunData
from headway.tracking.report.numbers import text

LINES = ("#0071e7", "#d57a2b", "#0d7057", "#ac45a1", "#6c4c00", "#00a3b8", "#512aae", "#722d2b")
"""Lines on a light page, by run; for one run by line."""

LINES_DARK = ("#0ea2ff", "#ff723d", "#72dea0", "#c573be", "#ffc400", "#8ef5fd", "#c2b1f6", "#da847d")
"""The same lines on a dark page."""

PAGE = "#ffffff"
PAGE_DARK = "#17191d"
"""What lines are drawn on."""


def colour(index: int) -> int:
    """The palette's entry for a line; after the last comes the first again."""
    return index % len(LINES)


def dash(index: int) -> str:
    """How lines are dashed that share a colour with an earlier one: an SVG dash pattern, empty for a solid line."""
    return ("", "7 3", "2 3", "9 3 2 3")[index // len(LINES) % 4]


def css() -> str:
    """Custom properties for both pages and one class for each colour."""
    light = "".join(f"--c{index}:{value};" for index, value in enumerate(LINES))
    dark = "".join(f"--c{index}:{value};" for index, value in enumerate(LINES_DARK))
    classes = "".join(f".c{index}{{--c:var(--c{index})}}" for index in range(len(LINES)))
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}{classes}"


MARKS = {
    "nan": "M-3.5-3.5L3.5 3.5M-3.5 3.5L3.5-3.5",
    "inf": "M0 4V-4M-3.5-.5L0-4L3.5-.5",
    "-inf": "M0-4V4M-3.5.5L0 4L3.5.5",
    "mixed": "M-3.5-3.5L3.5 3.5M-3.5 3.5L3.5-3.5",
}
"""Strokes around (0, 0)."""

MAX_SIGNS = 80
"""Signs of one kind and run on a chart; of more, equally many are left out between those shown."""
MAX_ROWS = 400
"""Rows of the table."""


@dataclass(frozen=True)
class EventKind:
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
}
_OTHER = "M0-3.4A3.4 3.4 0 1 1-.01-3.4Z"


def kind_of(name: str) -> EventKind:
    """What is known of a kind; of an unknown one, its own name."""
    return _KINDS.get(name) or EventKind(name.replace("_", " "), _OTHER)


def kinds(runs: Sequence[RunData]) -> dict[str, int]:
    """How often each kind happened, the known ones first."""
    found = Counter(event.kind for run in runs for event in run.events)
    known = [name for name in _KINDS if name in found]
    return {name: found[name] for name in [*known, *(name for name in found if name not in known)]}


def drawn(run: RunData) -> list[PlacedEvent]:
    """The events that get a sign, at most MAX_SIGNS of a kind."""
    by_kind: dict[str, list[PlacedEvent]] = {}
    for event in run.events:
        by_kind.setdefault(event.kind, []).append(event)
    found = [event for events in by_kind.values() for event in _thin(events)]
    return sorted(found, key=lambda event: event.seconds)


def _thin(events: list[PlacedEvent]) -> list[PlacedEvent]:
    if len(events) <= MAX_SIGNS:
        return events
    last = len(events) - 1
    return [events[index * last // (MAX_SIGNS - 1)] for index in range(MAX_SIGNS)]


_EMPTY: tuple[Any, ...] = (None, "", [], {})


def details(values: Mapping[str, Any], most: int = 300) -> str:
    """What came with an event, in one line."""
    parts = [
        f"{name.replace('_', ' ')} {_format_detail(name, value)}"
        for name, value in values.items()
        if value not in _EMPTY
    ]
    line = ", ".join(parts)
    return line if len(line) <= most else line[: most - 1] + "…"


def _format_detail(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    is_size = name.endswith("bytes")
    is_time = name.endswith("seconds")
    return text(value, "bytes" if is_size else "seconds" if is_time else "number")


def sentence(event: PlacedEvent) -> str:
    """An event in words, for the sign's own label."""
    where = f"step {text(event.step)}: " if event.has_step else ""
    more = details(event.details, 160)
    return f"{where}{kind_of(event.kind).words}{', ' + more if more else ''}"
