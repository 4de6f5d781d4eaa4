"""Draws a chart as SVG, for readers without JavaScript; script.js draws the same where it may."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from headway.report import events
from headway.report.axis import tick_text, ticks
from headway.report.data import RunData
from headway.report.palette import colour, dash
from headway.report.panels import Line, Panel, domain
from headway.report.reduce import Reduced, coarser, smooth

LEFT, RIGHT, TOP, BOTTOM = 56, 14, 22, 26
SIZE = (640, 236)
WIDE = (1312, 236)
TALL = (1312, 330)
SMOOTHING = 0.01
CROWD = 30
"""So many lines of events are drawn fainter, so that they do not hide the chart."""
_BUCKETS = 320
"""Buckets of a drawn line, as a chart on the page has about twice as many pixels; the page's data has more for zooming."""


@dataclass(frozen=True)
class Frame:
    """Where a chart's values lie in its picture.

    Attributes:
        size: width and height of the picture.
        across: the ends of the axis of steps.
        up: the ends of the axis of values.
    """

    size: tuple[int, int]
    across: tuple[float, float]
    up: tuple[float, float]

    def x(self, value: float) -> float:
        """From a step to a pixel."""
        low, high = self.across
        return LEFT + (value - low) / (high - low) * (self.size[0] - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """From a value to a pixel, not further out than a picture's height."""
        low, high = self.up
        share = min(2.0, max(-1.0, (value - low) / (high - low)))
        return self.size[1] - BOTTOM - share * (self.size[1] - TOP - BOTTOM)

    @property
    def foot(self) -> int:
        """The pixel of the lower axis."""
        return self.size[1] - BOTTOM


def across(panels: Sequence[Panel]) -> tuple[float, float]:
    """The ends of the axis of steps, the same for all charts."""
    steps = [end for panel in panels for line in panel.lines for end in (line.series.steps[0], line.series.steps[-1])]
    low, high = min(steps, default=0.0), max(steps, default=1.0)
    if 0 < low < 0.05 * high:
        low = 0.0
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def chart(panel: Panel, runs: Sequence[RunData], ends: tuple[float, float], number: int) -> str:
    """The chart as one `<svg>` element.

    Args:
        panel: what is drawn.
        runs: the runs, for their events.
        ends: the ends of the axis of steps.
        number: tells this chart's clip path from the others' on the page.
    """
    frame = Frame(TALL if panel.is_tall else WIDE if panel.is_wide else SIZE, ends, domain(panel))
    width, height = frame.size
    unit = "step" if all(run.has_steps for run in runs) else "seconds"
    inner = [_grid(frame, panel.unit, unit), _events(frame, runs)]
    inner += [f'<g clip-path="url(#p{number})">', *_lines(frame, panel), "</g>"]
    inner += [_marks(frame, line) for line in panel.lines]
    # A little wider than the axis, so that dots at its ends are whole.
    window = f'<rect x="{LEFT - 4}" y="{TOP}" width="{width - LEFT - RIGHT + 8}" height="{frame.foot - TOP + 1}"/>'
    names = ", ".join(f"{runs[line.run].label} {line.label}".strip() for line in panel.lines[:6])
    label = escape(f"{panel.title}: {names}", quote=True)
    inner.insert(0, f'<clipPath id="p{number}">{window}</clipPath>')
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{"".join(inner)}</svg>'


def _grid(frame: Frame, unit: str, unit_across: str) -> str:
    width = frame.size[0]
    parts = []
    rounded = ticks(*frame.up, 5 if frame.size == TALL else 4, unit)
    distance = rounded[1] - rounded[0] if len(rounded) > 1 else 1.0
    for value in rounded:
        y = frame.y(value)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{width - RIGHT}"/>')
        parts.append(_tick(LEFT - 8, y + 3.5, "end", tick_text(value, distance, unit)))
    rounded = ticks(*frame.across, width // 110, unit_across)
    distance = rounded[1] - rounded[0] if len(rounded) > 1 else 1.0
    for value in rounded:
        x = frame.x(value)
        anchor = "end" if x > width - 40 else "middle"
        parts.append(_tick(x, frame.foot + 17, anchor, tick_text(value, distance, unit_across)))
    if unit_across == "step":
        parts.append(_tick(LEFT - 8, frame.foot + 17, "end", "step"))
    parts.append(f'<path class="axis" d="M{LEFT} {frame.foot + 0.5}H{width - RIGHT}"/>')
    return "".join(parts)


def _tick(x: float, y: float, anchor: str, words: str) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def _events(frame: Frame, runs: Sequence[RunData]) -> str:
    parts = []
    found = [(index, event) for index, run in enumerate(runs) for event in events.drawn(run)]
    inside = [(index, event) for index, event in found if frame.across[0] <= event.step <= frame.across[1]]
    row = _SignRow()
    is_crowd = sum(events.kind_of(event.kind).has_line for _, event in inside) > CROWD
    for index, event in sorted(inside, key=lambda each: each[1].step):
        kind = events.kind_of(event.kind)
        x = frame.x(event.step)
        tone = f"c{colour(index)}" if len(runs) > 1 else kind.tone
        title = escape((f"{runs[index].label}: " if len(runs) > 1 else "") + events.sentence(event))
        drawn = "" if kind.has_line else f'<path class="foot" d="M{x:.1f} {frame.foot - 5}V{frame.foot}"/>'
        if kind.has_line:
            has_rule, place = row.take(x)
            drawn = f'<path class="rule" d="M{x:.1f} {TOP - 4}V{frame.foot}"/>' if has_rule else ""
            if place is not None:
                drawn += f'<path class="sign" transform="translate({place:.1f} {TOP - 11})" d="{kind.sign}"/>'
        parts.append(f'<g class="event {tone}{" crowd" if is_crowd else ""}"><title>{title}</title>{drawn}</g>')
    return "".join(parts)


class _SignRow:
    """Signs that would lie on one another move aside; where a crowd is, lines and signs stand for their neighbours."""

    def __init__(self) -> None:
        self._rule = self._sign = float("-inf")

    def take(self, x: float) -> tuple[bool, float | None]:
        """Is there a line, and where is the sign? `x` grows from call to call."""
        is_apart = abs(x - self._rule) >= 3
        moved = self._sign + 9 if self._sign - 36 < x < self._sign + 9 else x
        if is_apart:
            self._rule = x
        if moved > x + 28:
            return is_apart, None
        self._sign = moved
        return is_apart, moved


def _lines(frame: Frame, panel: Panel) -> list[str]:
    """What scatters lies under all lines, so that no run hides another."""
    under, over = [], []
    for line in panel.lines:
        series = coarser(line.series, _BUCKETS * (1 if frame.size == SIZE else 2))
        classes = f"c{colour(line.colour)}"
        xs = [frame.x(step) for step in series.steps]
        means = series.means
        if panel.is_smoothed and not line.is_dotted:
            means = smooth(means, SMOOTHING)
        if series.lows:
            under.append(f'<path class="band {classes}" d="{_band(frame, xs, series)}"/>')
        elif means != series.means:
            under.append(f'<path class="raw {classes}" d="{_path(frame, xs, series.means)}"/>')
        dashes = dash(line.colour) or ("5 4" if line.is_dashed else "")
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        over.append(f'<path class="line {classes}" d="{_path(frame, xs, means)}"{dashed}/>')
        if line.is_dotted:
            places = [(x, value) for x, value in zip(xs, means, strict=True) if value is not None]
            over += [
                f'<circle class="dot {classes}" cx="{x:.1f}" cy="{frame.y(value):.1f}" r="3"/>' for x, value in places
            ]
    return under + over


def _path(frame: Frame, xs: Sequence[float], values: Sequence[float | None]) -> str:
    """The line; a value between two gaps is a line of no length, whose round ends are a dot."""
    parts = []
    is_open = False
    for index, (x, value) in enumerate(zip(xs, values, strict=True)):
        if value is not None:
            is_alone = not is_open and (index + 1 == len(values) or values[index + 1] is None)
            parts.append(f"{'L' if is_open else 'M'}{x:.1f} {frame.y(value):.1f}{'h0' if is_alone else ''}")
        is_open = value is not None
    return "".join(parts)


def _band(frame: Frame, xs: Sequence[float], series: Reduced) -> str:
    """The area between minima and maxima; one piece between gaps."""
    parts = []
    piece: list[tuple[float, float, float]] = []
    for x, low, high in [*zip(xs, series.lows, series.highs, strict=True), (0.0, None, None)]:
        if low is not None and high is not None:
            piece.append((x, frame.y(low), frame.y(high)))
            continue
        if piece:
            there = "L".join(f"{x:.1f} {top:.1f}" for x, _, top in piece)
            back = "L".join(f"{x:.1f} {bottom:.1f}" for x, bottom, _ in reversed(piece))
            parts.append(f"M{there}L{back}Z")
        piece = []
    return "".join(parts)


def _marks(frame: Frame, line: Line) -> str:
    """Values that are not finite: crosses for nan, arrows for infinities, with a bar as long as they last."""
    parts = []
    for mark in line.series.marks:
        start, end = frame.x(mark.steps[0]), frame.x(mark.steps[1])
        y = frame.foot - 7 if mark.kind == "-inf" else TOP + 7
        bar = f'<path class="lasts" d="M{start:.1f} {y}H{end:.1f}"/>' if end - start > 1 else ""
        where = f"step {mark.steps[0]:.10g}" + (f" to {mark.steps[1]:.10g}" if mark.count > 1 else "")
        many = f" ({mark.count} values)" if mark.count > 1 else ""
        title = escape(f"{line.label or line.name}: {mark.kind} at {where}{many}")
        parts.append(
            f'<g class="mark c{colour(line.colour)}"><title>{title}</title>{bar}'
            f'<path class="nonfinite" transform="translate({start:.1f} {y})" d="{MARKS[mark.kind]}"/></g>'
        )
    return "".join(parts)


MARKS = {
    "nan": "M-3.5-3.5L3.5 3.5M-3.5 3.5L3.5-3.5",
    "inf": "M0 4V-4M-3.5-.5L0-4L3.5-.5",
    "-inf": "M0-4V4M-3.5.5L0 4L3.5.5",
    "mixed": "M-3.5-3.5L3.5 3.5M-3.5 3.5L3.5-3.5",
}
"""Strokes around (0, 0)."""
