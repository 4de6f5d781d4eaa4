"""How things look on the page: numbers in words, colours of lines, signs of events, marks of values, the page's frame.

The colours can be told apart with any colour vision, on a light and on a dark page. They were found by a search over lightness,
chroma and hue within each hue's range: it maximises the least distance (in Oklab) of any two as seen by people with normal, red-,
green- and blue-blind vision (simulated after Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of
Color Vision Deficiency", 2009), the first four weighing most, with a contrast of 3:1 or more to the page. A test holds the numbers.

The frame of a page: one HTML file that holds its style, script and data, and asks nothing of any network.

Numbers as people write them: bytes, shares, durations, rates; script.js writes them alike.
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
from headway.tracking.report.data import PlacedEvent, RunData


def _exponent(value: float) -> str:
    mantissa, _, power = f"{value:.2e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}e{int(power)}"


def short(value: float) -> str:
    """A large number in few characters: 12500 -> '12.5k'."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:  # what would be rounded to a thousand of the smaller one, too
            scaled = value / size
            return f"{scaled:.3g}{letter}" if abs(scaled) < 999 else _exponent(value)
    return f"{value:.4g}"


def text(value: float | None, unit: str = "number") -> str:
    """A value for reading: four significant digits, with its unit.

    Args:
        value: any float; None gives a dash.
        unit: "number", "bytes", "share", "seconds" or "rate" (a number that is shortened).
    """
    if value is None:
        return "-"
    if value != value:
        return "nan"
    if abs(value) > sys.float_info.max:  # also integers that no float can hold
        return "inf" if value > 0 else "-inf"
    if unit == "bytes":
        return format_bytes(value)
    if unit == "share":
        return f"{value * 100:.3g}%"
    if unit == "seconds":
        return duration(value)
    if unit == "rate" and abs(value) >= 10_000:
        return short(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e9:
        return _exponent(value)
    if value == int(value):
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.2f}"
    brief = f"{value:.4g}"
    return brief if "." in brief else f"{value:#.4g}"  # 2.000, not the whole number that it is not


def duration(seconds: float) -> str:
    """A duration in its two largest units: 3725 -> '1 h 2 min', 42 -> '42 s'."""
    if abs(seconds) < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    first = next(index for index, (amount, _) in enumerate(parts) if amount)
    return " ".join(f"{amount} {unit}" for amount, unit in parts[first : first + 2] if amount)


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
        f"{name.removesuffix('_seconds').replace('_', ' ')} {_format_detail(name, value)}"
        for name, value in values.items()
        if value not in _EMPTY
    ]
    line = ", ".join(parts)
    return line if len(line) <= most else line[: most - 1] + "…"


def _format_detail(name: str, value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(map(str, value))
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


def document(title: str, body: str, data: str | None = None) -> str:
    """A whole page.

    The content security policy lets only the page's own script run and nothing be fetched.

    Args:
        title: of the window.
        body: HTML, escaped already.
        data: what the script draws from, as JSON that cannot end its element; None: the page has no script.
    """
    style = files("headway.tracking.report").joinpath("style.css").read_text(encoding="utf-8") + css()
    script, allowed = "", "'none'"
    if data is not None:
        code = files("headway.tracking.report").joinpath("script.js").read_text(encoding="utf-8")
        allowed = f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"
        script = f'<script type="application/json" id="data">{data}</script>\n<script>{code}</script>\n'
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}\n</style>\n</head>\n<body>\n<main>\n"
        f"{body}\n</main>\n{script}</body>\n</html>\n"
    )
