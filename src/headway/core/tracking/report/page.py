"""HTML page of a report on one or more runs."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from html import escape
from itertools import groupby
from typing import Any

from headway.core.tracking.report.data import RunData
from headway.core.tracking.report.document import render_document
from headway.core.tracking.report.event_kinds import (
    count_kinds,
    describe_event,
    find_event_kind,
    render_hint,
    render_sign,
    select_drawn_events,
)
from headway.core.tracking.report.key_figures import format_time, infer_run_status
from headway.core.tracking.report.line_styles import LINE_COLORS, choose_color, choose_dash, render_swatch
from headway.core.tracking.report.panels import (
    SMOOTHING,
    ChartLine,
    Panel,
    build_panels,
    find_step_range,
    select_single_values,
)
from headway.core.tracking.report.progress_axes import Counts, find_progress_axes
from headway.core.tracking.report.tables import (
    render_event_table,
    render_overview,
    render_settings,
    render_single_values,
    render_values,
)

_HEADINGS = ("Training", "Evaluation", "Speed", "Memory", "More")
"""Headings of the sections with charts, in the order of the page. Each chart's `Panel.section` is one of them."""
_MARKS = {
    "nan": "M-3.5-3.5L3.5 3.5M-3.5 3.5L3.5-3.5",
    "inf": "M0 4V-4M-3.5-.5L0-4L3.5-.5",
    "-inf": "M0-4V4M-3.5.5L0 4L3.5.5",
    "mixed": "M-3.5-3.5L3.5 3.5M-3.5 3.5L3.5-3.5",
}
"""SVG paths, centered at (0, 0), of the marks for values that are not finite, by `NonFiniteMark.kind`."""
_MAX_STRONG_EVENT_LINES = 30
"""Number of vertical event lines on a chart above which they are drawn fainter, so that they do not hide the values."""


def html_page(runs: Sequence[RunData]) -> str:
    """Return the complete HTML page of a report. All text from a log is escaped.

    Args:
        runs: Runs of the report.
    """
    panels = [panel for panel in build_panels(runs) if panel.lines]
    single_values = select_single_values(runs, panels)
    progress_axes = find_progress_axes(runs)
    parts = [
        _render_header(runs),
        render_overview(runs),
        _render_toolbar(runs, progress_axes),
        "" if single_values and not panels else _render_charts(panels, runs),
        render_single_values(runs, single_values),
        render_event_table(runs),
        render_settings(runs),
        _render_footer(),
    ]
    title = runs[0].label if len(runs) == 1 else f"{len(runs)} runs"
    body = "\n".join(part for part in parts if part)
    return render_document(f"{title} · Headway report", body, _encode_data(panels, runs, progress_axes))


def _render_header(runs: Sequence[RunData]) -> str:
    """Return the HTML of the report's header: the name and status of a single run, or the number of runs."""
    if len(runs) == 1:
        run = runs[0]
        status = infer_run_status(run)
        project = run.project if run.project != run.label else ""
        about = [project, format_time(run.start_time), _describe_hardware(run)]
        note = f'<p class="note {status.tone}">{escape(status.note)}</p>' if status.note else ""
        return (
            f'<header><h1>{escape(run.label)} <span class="pill {status.tone}">{status.word}</span></h1>'
            f'<p class="about">{escape(" · ".join(part for part in about if part))}</p>{note}</header>'
        )
    num_finished = sum(run.is_finished for run in runs)
    projects = list(dict.fromkeys(run.project for run in runs if run.project))
    about = [*projects[:3], f"{num_finished} of {len(runs)} finished"]
    return f'<header><h1>{len(runs)} runs</h1><p class="about">{escape(" · ".join(about))}</p></header>'


def _describe_hardware(run: RunData) -> str:
    """Return the number of processes and the device of a run's last start, or "" if they were not logged."""
    if not run.starts:
        return ""
    count = run.starts[-1].world_size
    return f"{count} process{'es' if count != 1 else ''} on {run.starts[-1].device}"


def _render_toolbar(runs: Sequence[RunData], progress_axes: Iterable[str]) -> str:
    """Return the legend of runs and events, and the controls of the page, as HTML.

    The page's script turns the legend into buttons that show and hide runs and events. The controls work only with the
    script.

    Args:
        runs: Runs of the report.
        progress_axes: Names of the horizontal axes besides steps and time.
    """
    chips, legend = "", ""
    if len(runs) > 1:
        legend = "".join(
            f'<button type="button" class="chip" data-run="{index}" aria-pressed="true" title="{escape(run.label, quote=True)}">'
            f"{render_swatch(index)}<span>{escape(run.label)}</span></button>"
            for index, run in enumerate(runs)
        )
        legend = f'<div class="chips">{legend}</div>'
    for name, count in count_kinds(runs).items():
        kind = find_event_kind(name)
        tone = kind.tone if len(runs) == 1 else "calm"
        chips += (
            f'<button type="button" class="chip" data-kind="{escape(name, quote=True)}" aria-pressed="true"'
            f"{render_hint(kind)}>"
            f'<span class="event {tone}">{render_sign(kind)}</span><span>{escape(kind.label)}</span> <b>{count}</b></button>'
        )
    axes = ""
    if all(run.has_steps for run in runs):
        buttons = "".join(
            f'<button type="button" data-axis="{axis}" aria-pressed="{"true" if axis == "step" else "false"}">{axis}</button>'
            for axis in ("step", "time", *progress_axes)
        )
        axes = f'<span class="switch" role="group" aria-label="horizontal axis">{buttons}</span>'
    percent = f"{SMOOTHING * 100:g}"
    return (
        f'<nav class="bar">{legend}<div class="chips">{chips}</div><div class="controls">'
        '<button type="button" class="chip" id="unzoom" hidden>reset zoom</button>'
        f'<label>smoothing <input type="range" id="smoothing" min="0" max="10" step="0.5" value="{percent}">'
        f'<output id="share">{percent} %</output></label>{axes}</div></nav>'
    )


def _render_charts(panels: Sequence[Panel], runs: Sequence[RunData]) -> str:
    """Return the frames of all charts as HTML, in sections in the order of `_HEADINGS`."""
    if not panels:
        return '<p class="empty">This run has logged no values yet.</p>'
    order = sorted(range(len(panels)), key=lambda index: _HEADINGS.index(panels[index].section))
    parts = []
    for section, indices in groupby(order, key=lambda index: panels[index].section):
        cards = "".join(_render_card(panels[index], runs, index) for index in indices)
        parts.append(f'<section><h2>{section}</h2><div class="grid">{cards}</div></section>')
    return "\n".join(parts)


def _render_card(panel: Panel, runs: Sequence[RunData], number: int) -> str:
    """Return an empty frame for a chart as HTML. The page's script draws the chart into it.

    Browsers without scripts show a table of numbers instead.

    Args:
        panel: Chart.
        runs: Runs of the report.
        number: Index of the chart in the data for the script.
    """
    classes = "card wide" if panel.is_wide else "card"
    names = ", ".join(f"{runs[line.run].label} {line.label}".strip() for line in panel.lines[:6])
    label = escape(f"{panel.title}: {names}", quote=True)
    return (
        f'<figure class="{classes}" data-panel="{number}"><figcaption><h3>{escape(panel.title)}</h3>{_render_legend(panel, runs)}'
        f'<span class="tools"></span></figcaption><div class="plot" data-label="{label}"></div>'
        f"<noscript>{render_values(panel, runs)}</noscript></figure>"
    )


def _render_legend(panel: Panel, runs: Sequence[RunData]) -> str:
    """Return the legend of one chart as HTML; empty if all its lines have the same label.

    With several runs, each label appears once, in gray instead of a run's color.
    """
    labels: dict[str, ChartLine] = {}
    for line in panel.lines:
        labels.setdefault(line.label, line)
    if len(labels) < 2:
        return ""
    keys = []
    for label, line in labels.items():
        # With several runs, a color stands for a run, so a key shows only the style of its lines.
        color = f"c{choose_color(line.color)}" if len(runs) == 1 else "gray"
        style = "solid"
        if line.is_dotted:
            style = "dotted"
        elif line.is_dashed:
            style = "dashed"
        keys.append(f'<span class="key {color}"><i class="{style}"></i>{escape(label)}</span>')
    return f'<span class="keys">{"".join(keys)}</span>'


def _render_footer() -> str:
    """Return the HTML of the page's footer: how the page was made, and how to read and use the charts."""
    from headway.version import __version__

    made = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return (
        f"<footer>Made by Headway {__version__} on {made}."
        '<span class="scripted"> Bands show minimum and maximum where there are more values than points to draw. Smoothed '
        "lines are fitted around each point and ignore single spikes. Drag to zoom, double-click to reset.</span>"
        "<noscript> Charts need JavaScript. Without it, each chart is a table of numbers.</noscript></footer>"
    )


def _encode_data(
    panels: Sequence[Panel], runs: Sequence[RunData], progress_axes: Mapping[str, Sequence[Counts]]
) -> str:
    """Return the data for the page's script as JSON. Characters that could end the enclosing HTML element are escaped.

    Args:
        panels: Charts of the page.
        runs: Runs of the report.
        progress_axes: Counts of each run, by name of the axis.
    """
    kinds = {name: find_event_kind(name) for name in count_kinds(runs)}
    content = {
        "runs": [{"label": run.label, "restarts": run.restarts, "events": list(_encode_events(run))} for run in runs],
        "kinds": {name: {"sign": kind.sign, "tone": kind.tone, "line": kind.has_line} for name, kind in kinds.items()},
        "steps": all(run.has_steps for run in runs),
        "ends": find_step_range(panels),
        "axes": {name: list(map(_encode_counts, counts)) for name, counts in progress_axes.items()},
        "crowd": _MAX_STRONG_EVENT_LINES,
        "panels": list(map(_encode_panel, panels)),
        "dashes": [choose_dash(index) for index in range(4 * len(LINE_COLORS))],
        "marks": _MARKS,
    }
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.translate({ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"})


def _encode_counts(counts: Counts) -> dict[str, list[float | None]]:
    """Return the counts of one run as JSON values: `s` are the steps, and `n` the counts at these steps."""
    steps, numbers = zip(*counts, strict=True)
    return {"s": _round_all(steps, 12), "n": _round_all(numbers, 12)}


def _encode_events(run: RunData) -> Iterator[list[Any]]:
    """Yield a list of (kind, step, seconds, description) for each event that is drawn."""
    for event in select_drawn_events(run):
        yield [event.kind, _round_value(event.step), _round_value(event.seconds), describe_event(event)]


def _encode_panel(panel: Panel) -> dict[str, Any]:
    """Return a chart as JSON values for the page's script."""
    return {
        "title": panel.title,
        "unit": panel.unit,
        "zero": panel.starts_at_zero,
        "tall": panel.is_tall,
        "smooth": panel.is_smoothed,
        "lines": list(map(_encode_line, panel.lines)),
    }


def _encode_line(line: ChartLine) -> dict[str, Any]:
    """Return a line as a dict with short keys, because a page can contain thousands of values."""
    series = line.series
    encoded: dict[str, Any] = {
        "run": line.run, "label": line.label, "color": line.color, "dotted": line.is_dotted, "dashed": line.is_dashed,
        "s": _round_all(series.steps, 12), "t": _round_all(series.times, 7), "v": _round_all(series.means, 6),
    }  # fmt: skip
    if series.lows:
        encoded |= {"lo": _round_all(series.lows, 4), "hi": _round_all(series.highs, 4)}
    if series.marks:
        encoded["m"] = [
            [mark.kind, *map(_round_value, mark.steps), *map(_round_value, mark.times), mark.count]
            for mark in series.marks
        ]
    return encoded


def _round_all(values: Sequence[float | None], digits: int) -> list[float | None]:
    """Round all values to `digits` significant digits. None stays None."""
    return [None if value is None else _round_value(value, digits) for value in values]


def _round_value(value: float, digits: int = 12) -> float:
    """Round a value to `digits` significant digits, as many as a chart can show. Whole numbers become integers."""
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded
