"""HTML page of a memory forecast, with charts of memory during a step and of memory against batch size.

The charts are SVG and need no script.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from headway.common.text import format_bytes
from headway.core.tracking.report import looks
from headway.core.tracking.report.looks import render_document
from headway.core.tracking.report.tables import KeyFigure, render_swatch, render_tiles

_WIDTH, _HEIGHT = 960, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 86, 16, 40, 48
_MIN_WIDTH = 760
"""Width in pixels below which a chart scrolls sideways, so that its text stays readable on a phone."""
_CHARACTER = 6.2
"""Approximate width of a character in a chart's labels, in units of the SVG's coordinates."""
_ANSWERS = {True: ("fits", "good"), False: ("does not fit", "bad"), None: ("too close to tell", "warn")}
_AREA = "fill:var(--c);opacity:.78"
_UNSAID = ("set-up", "end")


def render_forecast_page(title: str, found: Mapping[str, Any]) -> str:
    """Return the HTML page of a memory forecast.

    Args:
        title: Name of the model or script that was forecast.
        found: Forecast, as returned by `Forecast.as_dict()`.
    """
    parts = [
        _render_header(title, found),
        _render_tiles(found),
        _render_chart(_name_timeline(found["timeline"]), *_draw_timeline(found["timeline"])),
    ]
    if found["by_batch"]:
        parts.append(_render_chart("Memory against the batch", *_draw_by_batch(found)))
    parts += [_render_split(found), _render_notes(found)]
    return render_document(f"{title} · Headway forecast", "\n".join(parts))


def _render_header(title: str, found: Mapping[str, Any]) -> str:
    pill = ""
    if found["budget"] is not None:
        word, tone = _ANSWERS[found["fits"]]
        pill = f' <span class="pill {tone}">{word}</span>'
    about = f"{found['device']}, a batch of {found['batch_size']}"
    return f'<header><h1>{escape(title)}{pill}</h1><p class="about">{escape(about)}</p></header>'


def _render_tiles(found: Mapping[str, Any]) -> str:
    span = f"from {format_bytes(found['least'])} to {format_bytes(found['most'])}: context and libraries vary"
    figures = [
        KeyFigure("in use on the device", format_bytes(found["total"]), span),
        KeyFigure("tensors", format_bytes(found["allocated"]), f"the most in {found['peak']}"),
        KeyFigure("allocator", format_bytes(found["reserved"]), "taken from the device by torch"),
    ]
    if found["budget"] is not None:
        figures.append(KeyFigure("budget", format_bytes(found["budget"]), "of the whole process"))
    for name, key in (("largest batch", "largest_batch"), ("longest sequence", "longest_sequence")):
        if found[key] is not None:
            figures.append(KeyFigure(name, f"{found[key]:,}", "that stays within the budget"))
    return render_tiles(figures)


def _render_chart(title: str, keys: str, drawing: str) -> str:
    return (
        f'<section><h2>{escape(title)}</h2><figure class="card wide"><figcaption>{keys}</figcaption><div class="plot">'
        f'<svg style="min-width:{_MIN_WIDTH}px" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'role="img" aria-label="{escape(title, quote=True)}">{drawing}</svg>'
        "</div></figure></section>"
    )


class _Axes:
    """Axes of an SVG chart of memory. They compute coordinates from values, and draw the grid and the labels.

    Args:
        ends: First and last value of the horizontal axis.
        most: Largest number of bytes on the vertical axis, which starts at zero.
    """

    def __init__(self, ends: tuple[float, float], most: int) -> None:
        self._low, high = ends
        self._span = (high - self._low) or 1
        self._step = _choose_grid_step(most)
        self._top = self._step * max(1, -(-most // self._step))

    def x(self, value: float) -> float:
        return round(_LEFT + (value - self._low) / self._span * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, size: float) -> float:
        return round(_HEIGHT - _BOTTOM - size / self._top * (_HEIGHT - _TOP - _BOTTOM), 1)

    def draw_grid(self) -> str:
        found = []
        for size in range(0, self._top + 1, self._step):
            place = self.y(size)
            found.append(f'<path class="grid" d="M{_LEFT} {place}H{_WIDTH - _RIGHT}"/>')
            label = format_bytes(size).replace(".0 ", " ")
            found.append(f'<text class="tick" x="{_LEFT - 8}" y="{place + 4}" text-anchor="end">{label}</text>')
        return "".join(found)

    @staticmethod
    def draw_names(across: str, up: str) -> str:
        """Return the labels of both axes as SVG."""
        middle = (_TOP + _HEIGHT - _BOTTOM) // 2
        return (
            f'<text class="tick" x="{(_LEFT + _WIDTH - _RIGHT) // 2}" y="{_HEIGHT - 6}" text-anchor="middle">{across}</text>'
            f'<text class="tick" x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{up}</text>'
        )


def _choose_grid_step(most: int) -> int:
    """Return the distance between grid lines in bytes: a power of two that results in four to eight lines.

    Args:
        most: Largest number of bytes on the axis.
    """
    step = 1
    while most / step > 8:
        step *= 2
    return step


def _draw_timeline(timeline: Mapping[str, Any]) -> tuple[str, str]:
    """Draw the memory during the traced training steps as stacked areas, one per kind of memory.

    Returns:
        HTML of the legend, and SVG of the drawing. Both are empty if nothing was traced.
    """
    places: Sequence[int] = timeline["places"]
    sizes: Mapping[str, Sequence[int]] = timeline["sizes"]
    if not places:
        return "", ""
    totals = [sum(column) for column in zip(*sizes.values())]
    axes = _Axes((places[0], places[-1]), max(totals))
    across = [axes.x(place) for place in places]
    floor, areas = [0] * len(places), []
    for index, (kind, row) in enumerate(sizes.items()):
        roof = [below + size for below, size in zip(floor, row)]
        upper = "L".join(f"{x} {axes.y(size)}" for x, size in zip(across, roof))
        lower = "L".join(f"{x} {axes.y(size)}" for x, size in zip(reversed(across), reversed(floor)))
        title = f"<title>{escape(kind)}</title>"
        areas.append(f'<path class="c{looks.choose_color(index)}" style="{_AREA}" d="M{upper}L{lower}Z">{title}</path>')
        floor = roof
    marks = _draw_phases([(phase, axes.x(first)) for phase, first in timeline["phases"]])
    keys = "".join(f'<span class="key">{render_swatch(index)}{escape(kind)}</span>' for index, kind in enumerate(sizes))
    names = axes.draw_names("allocations in their order", "memory of tensors")
    return f'<span class="keys">{keys}</span>', axes.draw_grid() + "".join(areas) + marks + names


def _name_timeline(timeline: Mapping[str, Any]) -> str:
    steps = {_split_phase(phase)[0] for phase, _ in timeline["phases"] if phase not in _UNSAID}
    return f"Memory over {len(steps)} training steps" if len(steps) > 1 else "Memory over a training step"


def _split_phase(phase: str) -> tuple[str, str]:
    """Return the step and the rest of a phase: ("step 1", "forward") for "step 1 forward"."""
    *words, last = phase.split(" ")
    return " ".join(words), last


def _draw_phases(phases: Sequence[tuple[str, float]]) -> str:
    """Return SVG with a vertical line at the start of each phase of the training steps.

    Labels name the steps, and in a second row the phases. The label of a phase is left out if there is no room.

    Args:
        phases: Each phase with the horizontal position of its start.
    """
    ends = [*(place for _, place in phases[1:]), float(_WIDTH - _RIGHT)]
    parts: list[str] = []
    earlier = ""
    for (phase, place), end in zip(phases, ends, strict=True):
        if phase in _UNSAID:
            continue
        step, name = _split_phase(phase)
        parts.append(
            f'<g><title>{escape(phase)}</title><path class="axis" d="M{place} {_TOP - 12}V{_HEIGHT - _BOTTOM}"/></g>'
        )
        if step != earlier:
            parts.append(f'<text class="tick" x="{place + 4}" y="{_TOP - 22}">{escape(step)}</text>')
        if len(name) * _CHARACTER + 6 <= end - place:
            parts.append(f'<text class="tick" x="{place + 4}" y="{_TOP - 6}">{escape(name)}</text>')
        earlier = step
    return "".join(parts)


def _draw_by_batch(found: Mapping[str, Any]) -> tuple[str, str]:
    """Draw the peak memory of the process against the batch size, with the memory budget.

    The largest batch size within the budget is marked.

    Returns:
        HTML of the legend, and SVG of the drawing.
    """
    points: Sequence[Sequence[int]] = found["by_batch"]
    budget = found["budget"]
    most = max([size for _, size in points] + ([budget] if budget is not None else []))
    axes = _Axes((0, points[-1][0]), most)
    line = "L".join(f"{axes.x(batch)} {axes.y(size)}" for batch, size in points)
    parts = [
        axes.draw_grid(),
        axes.draw_names("samples in a batch", "in use on the device"),
        f'<path class="line c0" d="M{line}"/>',
    ]
    stride = max(1, -(-points[-1][0] // 12))
    for batch in range(points[-1][0], 0, -stride):
        parts.append(
            f'<text class="tick" x="{axes.x(batch)}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{batch}</text>'
        )
    if budget is not None:
        place = axes.y(budget)
        parts.append(f'<path class="line c1" stroke-dasharray="7 3" d="M{_LEFT} {place}H{_WIDTH - _RIGHT}"/>')
    largest = found["largest_batch"]
    if largest:
        parts.append(f'<path class="axis" d="M{axes.x(largest)} {_TOP}V{_HEIGHT - _BOTTOM}"/>')
        is_right = axes.x(largest) > 0.85 * _WIDTH
        place, anchor = axes.x(largest) + (-4 if is_right else 4), "end" if is_right else "start"
        parts.append(f'<text class="tick" x="{place}" y="{_TOP - 6}" text-anchor="{anchor}">largest: {largest}</text>')
    keys = f'<span class="key">{render_swatch(0)}upper bound of memory in use</span><span class="key">{render_swatch(1)}budget</span>'
    return f'<span class="keys">{keys}</span>', "".join(parts)


def _render_split(found: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{escape(kind)}</td><td>{format_bytes(size)}</td><td>{size / max(1, found['allocated']):.0%}</td></tr>"
        for kind, size in found["split"].items()
    )
    where = f'<p class="about">asked for at {escape(found["peak_line"])}</p>' if found["peak_line"] else ""
    return (
        f"<section><h2>At the peak: {escape(found['peak'])}</h2>{where}"
        f'<div class="card scroll"><table><thead><tr><th>Kind</th><th>Memory</th><th>Share of tensors</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _render_notes(found: Mapping[str, Any]) -> str:
    from headway.version import __version__

    notes = "".join(f"<p>{escape(caveat)}</p>" for caveat in found["caveats"])
    if notes:
        about = "These parts of the forecast are known only roughly. They are why it gives a range."
        notes = f'<section><h2>Assumptions</h2><p class="about">{about}</p><div class="card">{notes}</div></section>'
    made = f"Headway {__version__} traced {found['num_traces']} training steps in {found['seconds']:.1f} s, without computing them."
    return f"{notes}<footer>{escape(made)}</footer>"
