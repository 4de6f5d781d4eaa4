"""HTML page of a memory forecast, with charts of memory during a step and of memory against batch size.

The charts are SVG and need no script.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from headway.common.text import format_bytes
from headway.core.tracking.report.document import render_document
from headway.core.tracking.report.key_figures import KeyFigure
from headway.core.tracking.report.line_styles import choose_color, render_swatch
from headway.core.tracking.report.tables import render_tiles

# Sizes of a chart and of the margins around its axes, in units of the SVG's coordinates
_WIDTH, _HEIGHT = 960, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 86, 16, 40, 48
_MIN_WIDTH = 760
"""Width in pixels below which a chart scrolls sideways, so that its text stays readable on a phone."""
_CHARACTER_WIDTH = 6.2
"""Approximate width of a character in a chart's labels, in units of the SVG's coordinates."""
_FIT_LABELS = {True: ("fits", "good"), False: ("does not fit", "bad"), None: ("too close to tell", "warn")}
"""Text and tone of the label in the header, by the forecast's entry "fits"."""
_AREA_STYLE = "fill:var(--c);opacity:.78"
"""CSS of the areas in a chart. `--c` is the color of the area's class."""
_UNLABELED_PHASES = ("set-up", "end")
"""Phases of the traced program that are not part of a training step."""


def render_forecast_page(title: str, forecast: Mapping[str, Any]) -> str:
    """Return the HTML page of a memory forecast.

    Args:
        title: Name of the model or script that was forecast.
        forecast: Forecast, as returned by `Forecast.as_dict()`.
    """
    parts = [
        _render_header(title, forecast),
        _render_tiles(forecast),
        _render_chart(_name_timeline(forecast["timeline"]), *_draw_timeline(forecast["timeline"])),
    ]
    if forecast["by_batch"]:
        parts.append(_render_chart("Memory against the batch", *_draw_by_batch(forecast)))
    parts += [_render_split(forecast), _render_notes(forecast)]
    return render_document(f"{title} · Headway forecast", "\n".join(parts))


def _render_header(title: str, forecast: Mapping[str, Any]) -> str:
    """Return the HTML of the page's header: the title, whether the run fits the budget, the device and the batch size."""
    pill = ""
    if forecast["budget"] is not None:
        text, tone = _FIT_LABELS[forecast["fits"]]
        pill = f' <span class="pill {tone}">{text}</span>'
    about = f"{forecast['device']}, a batch of {forecast['batch_size']}"
    return f'<header><h1>{escape(title)}{pill}</h1><p class="about">{escape(about)}</p></header>'


def _render_tiles(forecast: Mapping[str, Any]) -> str:
    """Return the HTML of the forecast's key figures, such as the memory in use."""
    memory_range = f"from {format_bytes(forecast['least'])} to {format_bytes(forecast['most'])}"
    figures = [
        KeyFigure(
            "in use on the device", format_bytes(forecast["total"]), f"{memory_range}: context and libraries vary"
        ),
        KeyFigure("tensors", format_bytes(forecast["allocated"]), f"the most in {forecast['peak']}"),
        KeyFigure("allocator", format_bytes(forecast["reserved"]), "taken from the device by torch"),
    ]
    if forecast["budget"] is not None:
        figures.append(KeyFigure("budget", format_bytes(forecast["budget"]), "of the whole process"))
    for name, key in (("largest batch", "largest_batch"), ("longest sequence", "longest_sequence")):
        if forecast[key] is not None:
            figures.append(KeyFigure(name, f"{forecast[key]:,}", "that stays within the budget"))
    return render_tiles(figures)


def _render_chart(title: str, legend: str, drawing: str) -> str:
    """Return a section with a chart as HTML.

    Args:
        title: Heading of the section.
        legend: Legend of the chart, as HTML.
        drawing: Content of the chart, as SVG elements.
    """
    return (
        f'<section><h2>{escape(title)}</h2><figure class="card wide"><figcaption>{legend}</figcaption><div class="plot">'
        f'<svg style="min-width:{_MIN_WIDTH}px" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'role="img" aria-label="{escape(title, quote=True)}">{drawing}</svg>'
        "</div></figure></section>"
    )


class _Axes:
    """Axes of an SVG chart of memory. They compute coordinates from values, and draw the grid and the labels.

    Args:
        x_range: First and last value of the horizontal axis.
        max_bytes: Largest number of bytes on the vertical axis, which starts at zero.
    """

    def __init__(self, x_range: tuple[float, float], max_bytes: int) -> None:
        self._low, high = x_range
        self._span = (high - self._low) or 1
        self._grid_step = _choose_grid_step(max_bytes)  # in bytes
        self._max_bytes = self._grid_step * max(1, math.ceil(max_bytes / self._grid_step))  # at the top of the axis

    def find_x(self, value: float) -> float:
        """Return the horizontal coordinate of a value, in units of the SVG."""
        return round(_LEFT + (value - self._low) / self._span * (_WIDTH - _LEFT - _RIGHT), 1)

    def find_y(self, num_bytes: float) -> float:
        """Return the vertical coordinate of a number of bytes, in units of the SVG."""
        return round(_HEIGHT - _BOTTOM - num_bytes / self._max_bytes * (_HEIGHT - _TOP - _BOTTOM), 1)

    def draw_grid(self) -> str:
        """Return the horizontal grid lines with their labels as SVG."""
        parts = []
        for num_bytes in range(0, self._max_bytes + 1, self._grid_step):
            y = self.find_y(num_bytes)
            parts.append(f'<path class="grid" d="M{_LEFT} {y}H{_WIDTH - _RIGHT}"/>')
            label = format_bytes(num_bytes).replace(".0 ", " ")
            parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{label}</text>')
        return "".join(parts)

    @staticmethod
    def draw_axis_labels(x_label: str, y_label: str) -> str:
        """Return the labels of both axes as SVG."""
        middle = (_TOP + _HEIGHT - _BOTTOM) // 2
        return (
            f'<text class="tick" x="{(_LEFT + _WIDTH - _RIGHT) // 2}" y="{_HEIGHT - 6}" text-anchor="middle">{x_label}</text>'
            f'<text class="tick" x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{y_label}</text>'
        )


def _choose_grid_step(max_bytes: int) -> int:
    """Return the distance between grid lines in bytes: a power of two that results in four to eight lines.

    Args:
        max_bytes: Largest number of bytes on the axis.
    """
    step = 1
    while max_bytes / step > 8:
        step *= 2
    return step


def _draw_timeline(timeline: Mapping[str, Any]) -> tuple[str, str]:
    """Draw the memory during the traced training steps as stacked areas, one per kind of memory.

    Returns:
        HTML of the legend, and SVG of the drawing. Both are empty if nothing was traced.
    """
    positions: Sequence[int] = timeline["places"]
    sizes: Mapping[str, Sequence[int]] = timeline["sizes"]
    if not positions:
        return "", ""
    totals = [sum(sizes_of_kinds) for sizes_of_kinds in zip(*sizes.values())]
    axes = _Axes((positions[0], positions[-1]), max(totals))
    xs = [axes.find_x(position) for position in positions]
    bottoms, areas = [0] * len(positions), []
    for index, (kind, row) in enumerate(sizes.items()):
        tops = [bottom + size for bottom, size in zip(bottoms, row)]
        upper = "L".join(f"{x} {axes.find_y(top)}" for x, top in zip(xs, tops))
        lower = "L".join(f"{x} {axes.find_y(bottom)}" for x, bottom in zip(reversed(xs), reversed(bottoms)))
        title = f"<title>{escape(kind)}</title>"
        areas.append(f'<path class="c{choose_color(index)}" style="{_AREA_STYLE}" d="M{upper}L{lower}Z">{title}</path>')
        bottoms = tops
    marks = _draw_phases([(phase, axes.find_x(start)) for phase, start in timeline["phases"]])
    keys = "".join(f'<span class="key">{render_swatch(index)}{escape(kind)}</span>' for index, kind in enumerate(sizes))
    labels = axes.draw_axis_labels("allocations in their order", "memory of tensors")
    return f'<span class="keys">{keys}</span>', axes.draw_grid() + "".join(areas) + marks + labels


def _name_timeline(timeline: Mapping[str, Any]) -> str:
    """Return the title of the chart of memory over time, with the number of training steps."""
    steps = {_split_phase(phase)[0] for phase, _ in timeline["phases"] if phase not in _UNLABELED_PHASES}
    return f"Memory over {len(steps)} training steps" if len(steps) > 1 else "Memory over a training step"


def _split_phase(phase: str) -> tuple[str, str]:
    """Return the step and the rest of a phase: ("step 1", "forward") for "step 1 forward"."""
    *words, last = phase.split(" ")
    return " ".join(words), last


def _draw_phases(phases: Sequence[tuple[str, float]]) -> str:
    """Return SVG with a vertical line at the start of each phase of the training steps.

    Labels name the steps, and in a second row the phases. The label of a phase is left out if there is no room.

    Args:
        phases: Pairs of (phase, horizontal coordinate of its start).
    """
    ends = [*(start for _, start in phases[1:]), float(_WIDTH - _RIGHT)]
    parts: list[str] = []
    previous_step = ""
    for (phase, start), end in zip(phases, ends, strict=True):
        if phase in _UNLABELED_PHASES:
            continue
        step, name = _split_phase(phase)
        parts.append(
            f'<g><title>{escape(phase)}</title><path class="axis" d="M{start} {_TOP - 12}V{_HEIGHT - _BOTTOM}"/></g>'
        )
        if step != previous_step:
            parts.append(f'<text class="tick" x="{start + 4}" y="{_TOP - 22}">{escape(step)}</text>')
        if len(name) * _CHARACTER_WIDTH + 6 <= end - start:
            parts.append(f'<text class="tick" x="{start + 4}" y="{_TOP - 6}">{escape(name)}</text>')
        previous_step = step
    return "".join(parts)


def _draw_by_batch(forecast: Mapping[str, Any]) -> tuple[str, str]:
    """Draw the peak memory of the process against the batch size, with the memory budget.

    The largest batch size within the budget is marked.

    Returns:
        HTML of the legend, and SVG of the drawing.
    """
    points: Sequence[Sequence[int]] = forecast["by_batch"]
    budget = forecast["budget"]
    largest_drawn_batch, _ = points[-1]
    max_bytes = max([size for _, size in points] + ([budget] if budget is not None else []))
    axes = _Axes((0, largest_drawn_batch), max_bytes)
    line = "L".join(f"{axes.find_x(batch)} {axes.find_y(size)}" for batch, size in points)
    parts = [
        axes.draw_grid(),
        axes.draw_axis_labels("samples in a batch", "in use on the device"),
        f'<path class="line c0" d="M{line}"/>',
    ]
    stride = max(1, math.ceil(largest_drawn_batch / 12))  # for at most 12 labels
    for batch in range(largest_drawn_batch, 0, -stride):
        parts.append(
            f'<text class="tick" x="{axes.find_x(batch)}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{batch}</text>'
        )
    if budget is not None:
        y = axes.find_y(budget)
        parts.append(f'<path class="line c1" stroke-dasharray="7 3" d="M{_LEFT} {y}H{_WIDTH - _RIGHT}"/>')
    largest = forecast["largest_batch"]
    if largest:
        x = axes.find_x(largest)
        parts.append(f'<path class="axis" d="M{x} {_TOP}V{_HEIGHT - _BOTTOM}"/>')
        # The text is on the left of the line if there is no room on its right.
        label_x, anchor = (x - 4, "end") if x > 0.85 * _WIDTH else (x + 4, "start")
        parts.append(
            f'<text class="tick" x="{label_x}" y="{_TOP - 6}" text-anchor="{anchor}">largest: {largest}</text>'
        )
    keys = f'<span class="key">{render_swatch(0)}upper bound of memory in use</span><span class="key">{render_swatch(1)}budget</span>'
    return f'<span class="keys">{keys}</span>', "".join(parts)


def _render_split(forecast: Mapping[str, Any]) -> str:
    """Return the HTML of the kinds of memory at the peak, with their sizes and shares."""
    rows = "".join(
        f"<tr><td>{escape(kind)}</td><td>{format_bytes(size)}</td><td>{size / max(1, forecast['allocated']):.0%}</td></tr>"
        for kind, size in forecast["split"].items()
    )
    peak_line = f'<p class="about">asked for at {escape(forecast["peak_line"])}</p>' if forecast["peak_line"] else ""
    return (
        f"<section><h2>At the peak: {escape(forecast['peak'])}</h2>{peak_line}"
        f'<div class="card scroll"><table><thead><tr><th>Kind</th><th>Memory</th><th>Share of tensors</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _render_notes(forecast: Mapping[str, Any]) -> str:
    """Return the HTML of the forecast's assumptions and of the page's footer."""
    from headway.version import __version__

    notes = "".join(f"<p>{escape(caveat)}</p>" for caveat in forecast["caveats"])
    if notes:
        about = "These parts of the forecast are known only roughly. They are why it gives a range."
        notes = f'<section><h2>Assumptions</h2><p class="about">{about}</p><div class="card">{notes}</div></section>'
    num_traces = forecast["num_traces"]
    plural = "" if num_traces == 1 else "s"
    made = (
        f"Headway {__version__} traced {num_traces} training step{plural} in {forecast['seconds']:.1f} s, without "
        "computing them."
    )
    return f"{notes}<footer>{escape(made)}</footer>"
