"""HTML page of a report on one or more runs."""

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from html import escape
from itertools import groupby
from typing import Any

from headway.core.tracking.report import looks, tables
from headway.core.tracking.report.data import RunData
from headway.core.tracking.report.looks import render_document
from headway.core.tracking.report.panels import (
    SMOOTHING,
    ChartLine,
    Panel,
    build_panels,
    find_step_range,
    select_single_values,
)
from headway.core.tracking.report.tables import (
    render_event_table,
    render_overview,
    render_settings,
    render_sign,
    render_single_values,
    render_swatch,
    render_values,
)

_HEADINGS = ("Training", "Evaluation", "Speed", "Memory", "More")
_MAX_STRONG_EVENT_LINES = 30
"""Number of vertical event lines on a chart above which they are drawn fainter, so that they do not hide the values."""


def html_page(runs: Sequence[RunData]) -> str:
    """Return the complete HTML page of a report. All text from a log is escaped.

    Args:
        runs: Runs of the report.
    """
    panels = [panel for panel in build_panels(runs) if panel.lines]
    single_values = select_single_values(runs, panels)
    parts = [
        _render_header(runs),
        render_overview(runs),
        _render_toolbar(runs),
        "" if single_values and not panels else _render_charts(panels, runs),
        render_single_values(runs, single_values),
        render_event_table(runs),
        render_settings(runs),
        _render_footer(),
    ]
    title = runs[0].label if len(runs) == 1 else f"{len(runs)} runs"
    body = "\n".join(part for part in parts if part)
    return render_document(f"{title} · Headway report", body, _encode_data(panels, runs, find_step_range(panels)))


def _render_header(runs: Sequence[RunData]) -> str:
    if len(runs) == 1:
        run = runs[0]
        status = tables.infer_run_status(run)
        project = run.project if run.project != run.label else ""
        about = [project, tables.format_time(run.start_time), _describe_hardware(run)]
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
    if not run.starts:
        return ""
    count = run.starts[-1].world_size
    return f"{count} process{'es' if count != 1 else ''} on {run.starts[-1].device}"


def _render_toolbar(runs: Sequence[RunData]) -> str:
    """Return the legend of runs and events, and the controls of the page, as HTML.

    The page's script turns the legend into buttons that show and hide runs and events. The controls work only with the
    script.
    """
    chips, legend = "", ""
    if len(runs) > 1:
        legend = "".join(
            f'<button type="button" class="chip" data-run="{index}" aria-pressed="true" title="{escape(run.label, quote=True)}">'
            f"{render_swatch(index)}<span>{escape(run.label)}</span></button>"
            for index, run in enumerate(runs)
        )
        legend = f'<div class="chips">{legend}</div>'
    for name, count in looks.count_kinds(runs).items():
        kind = looks.find_event_kind(name)
        tone = kind.tone if len(runs) == 1 else "calm"
        chips += (
            f'<button type="button" class="chip" data-kind="{escape(name, quote=True)}" aria-pressed="true"'
            f"{looks.render_hint(kind)}>"
            f'<span class="event {tone}">{render_sign(kind)}</span><span>{escape(kind.words)}</span> <b>{count}</b></button>'
        )
    axes = ""
    if all(run.has_steps for run in runs):
        axes = (
            '<span class="switch" role="group" aria-label="horizontal axis">'
            '<button type="button" data-axis="step" aria-pressed="true">step</button>'
            '<button type="button" data-axis="time" aria-pressed="false">time</button></span>'
        )
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
    keys = "".join(
        f'<span class="key {f"c{looks.choose_color(line.color)}" if len(runs) == 1 else "gray"}">'
        f'<i class="{"dotted" if line.is_dotted else "dashed" if line.is_dashed else "solid"}"></i>{escape(label)}</span>'
        for label, line in labels.items()
    )
    return f'<span class="keys">{keys}</span>'


def _render_footer() -> str:
    from headway.version import __version__

    made = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return (
        f"<footer>Made by Headway {__version__} on {made}."
        '<span class="scripted"> Bands show minimum and maximum where there are more values than points to draw; smoothed '
        "lines are fitted around each point and pass spikes by. Drag to zoom, double-click to go back.</span>"
        "<noscript> Charts need JavaScript; without it each shows its figures.</noscript></footer>"
    )


def _encode_data(panels: Sequence[Panel], runs: Sequence[RunData], step_range: tuple[float, float]) -> str:
    """Return the data for the page's script as JSON. Characters that could end the enclosing HTML element are escaped.

    Args:
        panels: Charts of the page.
        runs: Runs of the report.
        step_range: First and last step of the step axis.
    """
    kinds = {name: looks.find_event_kind(name) for name in looks.count_kinds(runs)}
    content = {
        "runs": [{"label": run.label, "restarts": run.restarts, "events": list(_encode_events(run))} for run in runs],
        "kinds": {name: {"sign": kind.sign, "tone": kind.tone, "line": kind.has_line} for name, kind in kinds.items()},
        "steps": all(run.has_steps for run in runs),
        "ends": step_range,
        "crowd": _MAX_STRONG_EVENT_LINES,
        "panels": list(map(_encode_panel, panels)),
        "dashes": [looks.choose_dash(index) for index in range(4 * len(looks.LINE_COLORS))],
        "marks": looks.MARKS,
    }
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.translate({ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"})


def _encode_events(run: RunData) -> Iterator[list[Any]]:
    """Yield a list of (kind, step, seconds, description) for each event that is drawn."""
    for event in looks.select_drawn_events(run):
        yield [event.kind, _round_value(event.step), _round_value(event.seconds), looks.describe_event(event)]


def _encode_panel(panel: Panel) -> dict[str, Any]:
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
    return [None if value is None else _round_value(value, digits) for value in values]


def _round_value(value: float, digits: int = 12) -> float:
    """Round a value to `digits` significant digits, as many as a chart can show. Whole numbers become integers."""
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded
