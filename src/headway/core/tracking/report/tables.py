"""HTML tables of a report: key figures, single values, the numbers of charts, events, and settings."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from headway.core.tracking.report.data import PlacedEvent, RunData
from headway.core.tracking.report.event_kinds import (
    find_event_kind,
    format_details,
    render_hint,
    render_sign,
)
from headway.core.tracking.report.key_figures import (
    KeyFigure,
    format_figure,
    format_setting,
    infer_run_status,
    list_differences,
    list_environment,
    list_key_figures,
    list_summary,
)
from headway.core.tracking.report.line_styles import render_swatch
from headway.core.tracking.report.number_formats import format_duration, format_value
from headway.core.tracking.report.panels import Panel
from headway.core.tracking.report.series import DownsampledSeries

_MAX_ROWS = 400
"""Maximum number of rows in the table of events."""
_MAX_OPEN_SETTINGS = 24
"""Number of settings above which a list of settings is initially collapsed."""


def render_overview(runs: Sequence[RunData]) -> str:
    """Return the key figures as HTML: tiles for one run, or a table for several runs."""
    if len(runs) == 1:
        return render_tiles(list_key_figures(runs[0]))
    figures_by_run = [{figure.name: figure for figure in list_key_figures(run)} for run in runs]
    names = list(dict.fromkeys(name for figures in figures_by_run for name in figures))
    rows = []
    for index, (run, figures) in enumerate(zip(runs, figures_by_run, strict=True)):
        status = infer_run_status(run)
        pill = f'<span class="pill {status.tone}" title="{escape(status.note)}">{status.word}</span>'
        cells = "".join(_render_cell(figures.get(name)) for name in names)
        rows.append(f"<th>{render_swatch(index)}{escape(run.label)}</th><td>{pill}</td>{cells}")
    head = "".join(f"<th>{escape(name)}</th>" for name in ("Run", "State", *names))
    return f'<div class="card scroll figures">{_render_table(head, rows)}</div>'


def render_tiles(figures: Sequence[KeyFigure]) -> str:
    """Return figures as HTML tiles with their names, values and notes, in rows of at most six."""
    cells = "".join(
        f"<div><dt>{escape(figure.name)}</dt><dd>{escape(figure.value)}<small>{escape(figure.note)}</small></dd></div>"
        for figure in figures
    )
    num_rows = max(1, math.ceil(len(figures) / 6))
    num_columns = max(1, math.ceil(len(figures) / num_rows))
    return f'<dl class="tiles" style="--columns:{num_columns}">{cells}</dl>'


def _render_table(head: str, rows: Iterable[str]) -> str:
    """Return an HTML table.

    Args:
        head: Cells of the head row as HTML.
        rows: Cells of each other row as HTML.
    """
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _render_run_columns(runs: Sequence[RunData]) -> str:
    """Return the head cells of a table with one column per run, as HTML."""
    return "".join(f"<th>{render_swatch(index)}{escape(run.label)}</th>" for index, run in enumerate(runs))


def _render_cell(figure: KeyFigure | None) -> str:
    """Return a table cell with a figure and its note. None: a cell with a dash."""
    if figure is None:
        return '<td class="none">-</td>'
    note = f"<small>{escape(figure.note)}</small>" if figure.note else ""
    return f"<td>{escape(figure.value)}{note}</td>"


def render_single_values(runs: Sequence[RunData], values: Mapping[str, Sequence[tuple[float, float] | None]]) -> str:
    """Return an HTML table of the values that were logged only once; "" if there are none.

    Args:
        runs: Runs of the report, one per column.
        values: For each name, one pair of (step, value) per run; None for a run without the value.
    """
    if not values:
        return ""
    rows = []
    for name, values_by_run in values.items():
        cells = ""
        for run, logged in zip(runs, values_by_run, strict=True):
            if logged is None:
                cells += _render_cell(None)
                continue
            step, value = logged
            note = f"step {format_value(step)}" if run.has_steps else ""
            cells += _render_cell(KeyFigure(name, format_figure(name, value), note))
        rows.append(f"<th>{escape(name)}</th>{cells}")
    head = f"<th>Name</th>{_render_run_columns(runs) if len(runs) > 1 else '<th>Value</th>'}"
    return (
        f'<section><h2>Single values</h2><div class="card scroll figures">{_render_table(head, rows)}</div></section>'
    )


def render_values(panel: Panel, runs: Sequence[RunData]) -> str:
    """Return an HTML table that replaces a chart in browsers without scripts, with one row per line of the chart.

    The columns are the name, the first, lowest, highest and last value, the number of values, and the number of non-finite
    values. The first and the last value are those of the downsampled line.

    Args:
        panel: Chart.
        runs: Runs of the report. The lines of the chart refer to them by index.
    """
    rows = []
    for line in panel.lines:
        run_label = runs[line.run].label if len(runs) > 1 else ""
        name = " · ".join(part for part in (run_label, line.label) if part)
        cells = "".join(f"<td>{format_value(value, panel.unit)}</td>" for value in _summarize_series(line.series))
        not_finite = sum(mark.count for mark in line.series.marks)
        rows.append(
            f"<th>{render_swatch(line.run) if len(runs) > 1 else ''}{escape(name or panel.title)}</th>{cells}"
            f"<td>{line.series.count:,}</td><td>{not_finite or '-'}</td>"
        )
    columns = ("Line", "First", "Lowest", "Highest", "Last", "Values", "Not finite")
    return f'<div class="scroll">{_render_table("".join(f"<th>{name}</th>" for name in columns), rows)}</div>'


def _summarize_series(series: DownsampledSeries) -> tuple[float | None, ...]:
    """Return the first, lowest, highest and last value of a series; None for each if no value is finite."""
    means = [mean for mean in series.means if mean is not None]
    low, high = series.find_bounds() or (None, None)
    return (means[0], low, high, means[-1]) if means else (None, None, None, None)


def render_event_table(runs: Sequence[RunData]) -> str:
    """Return the events of all runs as an HTML table, ordered by run and time; "" if there are none.

    If there are more than `_MAX_ROWS` events, only the most serious ones are shown.
    """
    rows = [(index, event) for index, run in enumerate(runs) for event in run.events]
    if not rows:
        return ""
    shown = rows if len(rows) <= _MAX_ROWS else _select_rows(rows)
    lines = []
    for index, event in shown:
        kind = find_event_kind(event.kind)
        name = f"<td>{render_swatch(index)}{escape(runs[index].label)}</td>" if len(runs) > 1 else ""
        step = format_value(event.step) if event.has_step else "-"
        lines.append(
            f'{name}<td class="number">{step}</td><td class="number">{format_duration(event.seconds)}</td>'
            f'<td><span class="event {kind.tone}"{render_hint(kind)}>{render_sign(kind)}{escape(kind.label)}</span></td>'
            f'<td class="details">{escape(format_details(event.details))}</td>'
        )
    head = "<th>Run</th>" if len(runs) > 1 else ""
    head += '<th class="number">Step</th><th class="number">After</th><th>Event</th><th>Details</th>'
    num_hidden = len(rows) - len(shown)
    hidden = f'<p class="about">{num_hidden:,} more are not listed.</p>' if num_hidden else ""
    is_open = " open" if len(shown) <= 30 else ""
    count = f"{len(rows):,} event{'s' if len(rows) > 1 else ''}"
    return (
        f'<section><h2>Events</h2><details class="card scroll"{is_open}><summary>{count}</summary>'
        f"{_render_table(head, lines)}{hidden}</details></section>"
    )


def _select_rows(rows: list[tuple[int, PlacedEvent]]) -> list[tuple[int, PlacedEvent]]:
    """Return the most serious events, at most `_MAX_ROWS` of them, in their original order."""
    seriousness = {"bad": 0, "warn": 1, "good": 2, "calm": 3}

    def rank_row(index: int) -> int:
        _, event = rows[index]
        return seriousness[find_event_kind(event.kind).tone]

    by_seriousness = sorted(range(len(rows)), key=rank_row)
    return [rows[index] for index in sorted(by_seriousness[:_MAX_ROWS])]


def render_settings(runs: Sequence[RunData]) -> str:
    """Return each run's configuration, summary and environment as HTML.

    With several runs, a table of their differences comes first.
    """
    parts = [_render_differences(runs)] if len(runs) > 1 else []
    is_open = len(runs) == 1
    for index, run in enumerate(runs):
        name = f"{render_swatch(index)}{escape(run.label)}" if len(runs) > 1 else "Run"
        configuration = [(key, format_setting(value)) for key, value in run.config.items()]
        environment = [(figure.name, figure.value) for figure in list_environment(run)]
        lists = [
            _render_list("Configuration", configuration, is_open),
            _render_list("Summary", list_summary(run), is_open),
            _render_list("Environment", environment, is_open),
            _render_list("Texts", list(run.texts.items()), False),
        ]
        parts.append(f'<section><h2>{name}</h2><div class="grid lists">{"".join(lists)}</div></section>')
    return "\n".join(parts)


def _render_differences(runs: Sequence[RunData]) -> str:
    """Return the settings that differ between runs as an HTML table, or a text if there are none."""
    rows = []
    for name, values in list_differences(runs):
        cells = "".join(_render_cell(None if value is None else KeyFigure(name, value)) for value in values)
        rows.append(f"<th>{escape(name)}</th>{cells}")
    differences = '<p class="about">The runs were configured alike.</p>'
    if rows:
        table = _render_table(f"<th>Setting</th>{_render_run_columns(runs)}", rows)
        differences = f'<div class="card scroll">{table}</div>'
    return f"<section><h2>Differences</h2>{differences}</section>"


def _render_list(title: str, rows: Sequence[tuple[str, str]], is_open: bool) -> str:
    """Return a collapsible list of names and values as HTML, or "" if there are no rows.

    Args:
        title: Title of the list.
        rows: Pairs of (name, value).
        is_open: Whether the list is expanded at first, unless it is long.
    """
    if not rows:
        return ""
    inner = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in rows)
    opened = " open" if is_open and len(rows) <= _MAX_OPEN_SETTINGS else ""
    return f'<details class="card"{opened}><summary>{title} <b>{len(rows)}</b></summary><dl class="rows">{inner}</dl></details>'
