"""Presentation of a report: number formats, line colors, signs of events, marks of values, and the page's frame.

The colors can be distinguished with any color vision, on a light and on a dark page. They were found by a search
over lightness, chroma and hue within each hue's range. The search maximizes the smallest distance (in Oklab) between
any two colors as seen with normal, red-, green- and blue-blind vision. The vision is simulated after Machado,
Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency", 2009. The first
four colors have the most weight, and the contrast with the page is 3:1 or more. A test checks these numbers.

A page is one HTML file that contains its style, script and data, and loads nothing over the network.

Numbers (bytes, percentages, durations, rates) are formatted for people to read. script.js uses the same formats.
"""

import base64
import hashlib
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from headway.common.text import format_bytes
from headway.core.tracking.report.data import PlacedEvent, RunData

LINE_COLORS = ("#0071e7", "#d57a2b", "#0d7057", "#ac45a1", "#6c4c00", "#00a3b8", "#512aae", "#722d2b")
"""Line colors on a light page.

With several runs, each run has a color. With a single run, each line of a chart has a color.
"""
LINE_COLORS_DARK = ("#0ea2ff", "#ff723d", "#72dea0", "#c573be", "#ffc400", "#8ef5fd", "#c2b1f6", "#da847d")
"""Line colors on a dark page, in the order of `LINE_COLORS`."""
PAGE_COLOR = "#ffffff"
PAGE_COLOR_DARK = "#17191d"
"""Background color of charts on a dark page."""

MARKS = {
    "nan": "M-3.5-3.5L3.5 3.5M-3.5 3.5L3.5-3.5",
    "inf": "M0 4V-4M-3.5-.5L0-4L3.5-.5",
    "-inf": "M0-4V4M-3.5.5L0 4L3.5.5",
    "mixed": "M-3.5-3.5L3.5 3.5M-3.5 3.5L3.5-3.5",
}
"""SVG paths, centered at (0, 0), of the marks for values that are not finite."""
MAX_SIGNS = 80
"""Maximum number of event signs of one kind and run on a chart.

If there are more events, evenly spaced ones are shown.
"""
MAX_ROWS = 400
"""Maximum number of rows in the table of events."""
_OTHER = "M0-3.4A3.4 3.4 0 1 1-.01-3.4Z"
_CONNECTED = "A tracker has opened its run. By the identity, a resumed training continues it."
_EMPTY: tuple[Any, ...] = (None, "", [], {})


def _format_exponent(value: float) -> str:
    mantissa, _, power = f"{value:.2e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}e{int(power)}"


def format_short(value: float) -> str:
    """Return a number as short text, as in '12.5k' for 12500."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:  # includes values that would round to 1000 of the smaller unit
            scaled = value / size
            return f"{scaled:.3g}{letter}" if abs(scaled) < 999 else _format_exponent(value)
    return f"{value:.4g}"


def format_value(value: float | None, unit: str = "number") -> str:
    """Return a value as short text with its unit. Small fractional numbers have four significant digits.

    Args:
        value: Value to format; None for a dash.
        unit: "number", "bytes", "share" (a fraction, shown in percent), "seconds" or "rate". Rates from 10,000 on are
            abbreviated, as in "12.5k". Default: "number".
    """
    if value is None:
        return "-"
    if value != value:
        return "nan"
    if abs(value) > sys.float_info.max:  # also for integers beyond the range of floats
        return "inf" if value > 0 else "-inf"
    if unit == "bytes":
        return format_bytes(value)
    if unit == "share":
        return f"{value * 100:.3g}%"
    if unit == "seconds":
        return format_duration(value)
    if unit == "rate" and abs(value) >= 10_000:
        return format_short(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e9:
        return _format_exponent(value)
    if value == int(value):
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.2f}"
    brief = f"{value:.4g}"
    return brief if "." in brief else f"{value:#.4g}"  # "2.000" rather than "2", because the value is not an integer


def format_duration(seconds: float) -> str:
    """Return a duration in its two largest units, as in '1 h 2 min' for 3725 and '42 s' for 42."""
    if abs(seconds) < 60:
        return f"{seconds:.3g} s"
    total = round(seconds)
    parts = [(total // 86400, "d"), (total // 3600 % 24, "h"), (total // 60 % 60, "min"), (total % 60, "s")]
    first = next(index for index, (amount, _) in enumerate(parts) if amount)
    return " ".join(f"{amount} {unit}" for amount, unit in parts[first : first + 2] if amount)


def choose_color(index: int) -> int:
    """Return the index of a line's color in `LINE_COLORS`. Colors repeat if there are more lines than colors."""
    return index % len(LINE_COLORS)


def choose_dash(index: int) -> str:
    """Return the SVG dash pattern of a line, which distinguishes lines with equal colors; empty for a solid line."""
    return ("", "7 3", "2 3", "9 3 2 3")[index // len(LINE_COLORS) % 4]


def render_colors() -> str:
    """Return the CSS of the line colors: variables for light and dark pages, and one class per color."""
    light = "".join(f"--c{index}:{value};" for index, value in enumerate(LINE_COLORS))
    dark = "".join(f"--c{index}:{value};" for index, value in enumerate(LINE_COLORS_DARK))
    classes = "".join(f".c{index}{{--c:var(--c{index})}}" for index in range(len(LINE_COLORS)))
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}{classes}"


@dataclass(frozen=True)
class EventKind:
    """Presentation of a kind of event on charts and in tables.

    Attributes:
        words: Name on the page.
        sign: SVG path of the event's sign, centered at (0, 0) and about 8 units wide.
        tone: "bad", "warn", "good" or "calm". It determines the color.
        has_line: Whether the event is drawn as a vertical line. Otherwise it has a short mark at the bottom of the
            chart.
        about: Explanation that is shown when the pointer rests on the name; may be empty.
    """

    words: str
    sign: str
    tone: str = "calm"
    has_line: bool = True
    about: str = ""


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
    "tracker": EventKind("tracker connected", _OTHER, has_line=False, about=_CONNECTED),
    "tracker_failed": EventKind("tracker failed", _OTHER, "warn", has_line=False),
    "tracker_dropped": EventKind("tracker dropped", _OTHER, "warn", has_line=False),
}


def find_event_kind(name: str) -> EventKind:
    """Return the presentation of a kind of event. Unknown kinds get a neutral sign, and their own name as text."""
    return _KINDS.get(name) or EventKind(name.replace("_", " "), _OTHER)


def render_hint(kind: EventKind) -> str:
    """Return an HTML attribute that shows the explanation of a kind of event, or "" if there is none."""
    return f' title="{escape(kind.about, quote=True)}"' if kind.about else ""


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
    return name.removesuffix("_seconds").replace("_", " ")


def _format_detail(name: str, value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(_format_detail(name, each) for each in value)
    if isinstance(value, Mapping):
        text = ", ".join(f"{_format_name(key)} {_format_detail(key, each)}" for key, each in value.items())
        return text if len(value) == 1 else f"({text})"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    is_size = name.endswith("bytes")
    is_time = name.endswith("seconds")
    return format_value(value, "bytes" if is_size else "seconds" if is_time else "number")


def describe_event(event: PlacedEvent) -> str:
    """Return one line of text about an event, for the label of its sign."""
    step = f"step {format_value(event.step)}: " if event.has_step else ""
    details = format_details(event.details, 160)
    return f"{step}{find_event_kind(event.kind).words}{', ' + details if details else ''}"


def render_document(title: str, body: str, data: str | None = None) -> str:
    """Return a complete HTML page.

    The content security policy allows only the page's own script and no network requests.

    Args:
        title: Title of the window.
        body: HTML, already escaped.
        data: Data for the script, as JSON in which "<" is escaped; None for a page without a script.
    """
    style = files("headway.core.tracking.report").joinpath("style.css").read_text(encoding="utf-8") + render_colors()
    script, allowed_scripts = "", "'none'"
    if data is not None:
        code = files("headway.core.tracking.report").joinpath("script.js").read_text(encoding="utf-8")
        allowed_scripts = f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"
        script = f'<script type="application/json" id="data">{data}</script>\n<script>{code}</script>\n'
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed_scripts}; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}\n</style>\n</head>\n<body>\n<main>\n"
        f"{body}\n</main>\n{script}</body>\n</html>\n"
    )
