"""Text and tables of a report: a run's status, key figures, events, settings, and differences between runs."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from operator import itemgetter
from statistics import median
from typing import Any

from headway.core.tracking.report import looks
from headway.core.tracking.report.data import PlacedEvent, RunData
from headway.core.tracking.report.looks import find_event_kind, format_duration, format_value
from headway.core.tracking.report.panels import WAIT_BY_RANK, Panel, split_role
from headway.core.tracking.report.series import DownsampledSeries

_ALIVE_SECONDS = 120.0
"""Seconds without a new line in the log after which an unfinished run is assumed to be dead."""
_METRICS = ("accuracy", "acc", "f1", "auc", "perplexity", "precision", "recall", "bleu")
"""Last words of names, such as "train_accuracy", whose values are shown as metrics even outside an evaluation."""
_NO_METRICS = ("loss", "runtime", "per_second", "memory", "memory_peak", "epoch", "step", "time")
"""Endings of names, such as "eval_runtime", whose values are not shown as metrics of an evaluation."""
_MAX_METRICS = 4
"""Maximum number of metrics among the key figures."""
_MAX_OPEN_SETTINGS = 24
"""Number of settings above which a list of settings is initially collapsed."""


@dataclass(frozen=True)
class KeyFigure:
    """One figure in a report, with its name and an explanation.

    Attributes:
        name: Name of the figure.
        value: Value as text.
        note: Explanation of the value, or where it occurred; may be empty.
    """

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class RunStatus:
    """Status of a run, such as finished or killed, as inferred from its log.

    Attributes:
        word: "finished", "preempted", "cut off", "no end yet" or "no end".
        tone: "good", "warn" or "bad".
        note: Reason why the report assumes this status; empty for a finished run.
    """

    word: str
    tone: str
    note: str


def infer_run_status(run: RunData) -> RunStatus:
    """Return the status of a run, such as finished or killed, as inferred from its log."""
    if run.is_finished:
        return RunStatus("finished", "good", "")
    silence = f"its last line was written {format_duration(run.seconds_since_last_line)} before this page was made"
    if run.ends_in_partial_line:
        return RunStatus("cut off", "bad", f"killed in the middle of a line; {silence}")
    kinds = [event.kind for event in run.events]
    if kinds and "preempted" in kinds and kinds[-1] not in ("resumed", "restart"):
        return RunStatus("preempted", "warn", f"it was asked to stop and has not been resumed; {silence}")
    if run.seconds_since_last_line < _ALIVE_SECONDS:
        return RunStatus("no end yet", "warn", f"still running, or stopped just now; {silence}")
    return RunStatus("no end", "bad", f"killed, or still running but silent; {silence}")


def format_time(seconds: float) -> str:
    """Return a date and time of day in this machine's time zone.

    Args:
        seconds: Seconds since 1970.
    """
    try:
        return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    except (ValueError, OverflowError, OSError):  # a log may contain any number
        return f"{seconds:g} s after 1970"


def list_key_figures(run: RunData) -> list[KeyFigure]:
    """Return the figures at the top of a report: updates, duration, losses, speed, memory and incidents.

    Figures that were not logged are left out.
    """
    figures = []
    if run.last_step is not None:
        figures.append(KeyFigure("Updates", format_value(run.last_step)))
    attempts = f"{len(run.starts)} attempts" if len(run.starts) > 1 else ""
    figures.append(KeyFigure("Duration", format_duration(run.seconds), attempts))
    figures += _list_losses(run)
    figures += _list_metrics(run)
    for name, title, unit in (
        ("samples_per_second", "Samples/s", "rate"),
        ("tokens_per_second", "Tokens/s", "rate"),
        ("mfu", "FLOPs utilization", "share"),
        ("data_wait", "Waiting for data", "share"),
    ):
        if values := _select_finite(run, name):
            figures.append(KeyFigure(title, format_value(median(values), unit), "median"))
    waits = {
        name: values for name in run.series if name.startswith(WAIT_BY_RANK) and (values := _select_finite(run, name))
    }
    if waits:
        longest = max(waits, key=lambda name: median(waits[name]))
        share = format_value(median(waits[longest]), "share")
        rank = f"rank {longest.removeprefix(WAIT_BY_RANK)}"
        figures.append(KeyFigure("Waits longest for data", rank, f"{share} of its time, median"))
    peaks = [value for name in run.series if name.startswith("memory") for value in _select_finite(run, name)]
    if peaks:
        figures.append(KeyFigure("Peak memory", format_value(max(peaks), "bytes")))
    troubles = Counter(event.kind for event in run.events if find_event_kind(event.kind).tone in ("bad", "warn"))
    if troubles:
        description = ", ".join(f"{count} {find_event_kind(kind).words}" for kind, count in troubles.most_common())
        figures.append(KeyFigure("Incidents", str(troubles.total()), description))
    return figures


def _list_losses(run: RunData) -> list[KeyFigure]:
    """Return the final training loss, and the best loss of each kind of evaluation."""
    figures = []
    training_name = next((name for name in run.series if split_role(name) == ("", "loss")), "loss")
    if losses := _select_finite(run, training_name):
        last_losses = losses[-max(1, len(losses) // 50) :]
        note = f"from {format_value(losses[0])}" if len(losses) > 1 else ""
        note += f", mean of the last {len(last_losses)}" if len(last_losses) > 1 else ""
        figures.append(KeyFigure("Training loss", format_value(sum(last_losses) / len(last_losses)), note))
    # If several names have one role, such as "eval_loss" and "eval/loss", the last one is shown.
    series_by_kind = {}
    for name, series in run.series.items():
        kind, metric = split_role(name)
        if kind and metric == "loss":
            series_by_kind[kind] = series
    for kind, series in series_by_kind.items():
        if finite := [(value, step) for step, _, value in series if abs(value) < float("inf")]:
            best_value, best_step = min(finite, key=itemgetter(0))
            note = f"at step {format_value(best_step)}" if run.has_steps else ""
            figures.append(KeyFigure(f"Best {kind} loss", format_value(best_value), note))
    return figures


def _list_metrics(run: RunData) -> list[KeyFigure]:
    """Return the metrics of a run other than losses, such as the accuracy of an evaluation, with their last values."""
    figures: list[KeyFigure] = []
    for name in run.series:
        kind, metric = split_role(name)
        is_metric = metric.rpartition("_")[2] in _METRICS or (kind and not metric.endswith(_NO_METRICS))
        values = _select_finite(run, name)
        if is_metric and values and len(figures) < _MAX_METRICS:
            note = f"from {format_value(min(values))} to {format_value(max(values))}" if len(values) > 1 else ""
            title = f"{kind} {metric}".strip().replace("_", " ").replace("/", " ")
            figures.append(KeyFigure(title[:1].upper() + title[1:], format_value(values[-1]), note))
    return figures


def _list_summary(run: RunData) -> list[tuple[str, str]]:
    """Return pairs of (name, text) for the final values of a run.

    The duration is left out, unless the run was restarted. It is then shown as that of the last process.
    """
    rows = [(key, format_figure(key, value)) for key, value in run.summary.items() if key != "seconds"]
    seconds = run.summary.get("seconds")
    if len(run.starts) > 1 and isinstance(seconds, int | float) and not isinstance(seconds, bool):
        rows.append(("duration of the last attempt", format_duration(seconds)))
    return rows


def list_environment(run: RunData) -> list[KeyFigure]:
    """Return figures about a run's environment: times, project, processes, device, versions and the log's path."""
    figures = [
        KeyFigure("Began", format_time(run.start_time)),
        KeyFigure("Last line", format_time(run.start_time + run.seconds)),
    ]
    figures += [KeyFigure("Project", run.project)] if run.project else []
    if run.starts:
        last = run.starts[-1]
        worlds = list(dict.fromkeys(start.world_size for start in run.starts))
        devices = list(dict.fromkeys(start.device for start in run.starts))
        figures.append(KeyFigure("Processes", " → ".join(map(str, worlds))))
        figures.append(KeyFigure("Device", " → ".join(devices)))
        figures.append(KeyFigure("Attempts", str(len(run.starts))))
        figures += [KeyFigure(name, str(version)) for name, version in last.versions.items()]
    if run.damaged_lines:
        figures.append(KeyFigure("Unreadable lines", ", ".join(map(str, run.damaged_lines[:10])), "left out"))
    figures.append(KeyFigure("Log", str(run.path)))
    return figures


def list_differences(runs: Sequence[RunData]) -> list[tuple[str, list[str | None]]]:
    """Return the settings, numbers of processes, devices and versions that differ between runs.

    The result contains pairs of (name, values). The values are texts, one per run; None if a run lacks the setting.
    """
    tables = [{**run.config, **_list_circumstances(run)} for run in runs]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [(name, [format_setting(table[name]) if name in table else None for table in tables]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _list_circumstances(run: RunData) -> dict[str, Any]:
    if not run.starts:
        return {}
    last = run.starts[-1]
    versions = {f"version of {name}": version for name, version in last.versions.items()}
    return {"processes": last.world_size, "device": last.device, **versions}


def format_setting(value: Any) -> str:
    """Return a setting as text: strings unchanged, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def format_figure(name: str, value: Any) -> str:
    """Return a value of the summary as text, with the unit that its name indicates."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return format_setting(value)
    is_bytes = name.endswith("bytes") or "memory" in name
    is_seconds = name.endswith(("runtime", "_seconds"))
    return format_value(value, "bytes" if is_bytes else "seconds" if is_seconds else "number")


def _select_finite(run: RunData, name: str) -> list[float]:
    return [value for _, _, value in run.series.get(name, []) if abs(value) < float("inf")]


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
    num_rows = -(-len(figures) // 6) or 1
    return f'<dl class="tiles" style="--columns:{-(-len(figures) // num_rows) or 1}">{cells}</dl>'


def _render_table(head: str, rows: Iterable[str]) -> str:
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _render_run_columns(runs: Sequence[RunData]) -> str:
    return "".join(f"<th>{render_swatch(index)}{escape(run.label)}</th>" for index, run in enumerate(runs))


def _render_cell(figure: KeyFigure | None) -> str:
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
        name = " · ".join(part for part in (runs[line.run].label if len(runs) > 1 else "", line.label) if part)
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

    If there are more than `MAX_ROWS` events, only the most serious ones are shown.
    """
    rows = [(index, event) for index, run in enumerate(runs) for event in run.events]
    if not rows:
        return ""
    shown = rows if len(rows) <= looks.MAX_ROWS else _select_rows(rows)
    lines = []
    for index, event in shown:
        kind = looks.find_event_kind(event.kind)
        name = f"<td>{render_swatch(index)}{escape(runs[index].label)}</td>" if len(runs) > 1 else ""
        step = format_value(event.step) if event.has_step else "-"
        lines.append(
            f'{name}<td class="number">{step}</td><td class="number">{format_duration(event.seconds)}</td>'
            f'<td><span class="event {kind.tone}"{looks.render_hint(kind)}>{render_sign(kind)}{escape(kind.words)}</span></td>'
            f'<td class="details">{escape(looks.format_details(event.details))}</td>'
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
    """Return the most serious events, at most `MAX_ROWS` of them, in their original order."""
    seriousness = {"bad": 0, "warn": 1, "good": 2, "calm": 3}

    def rank_row(index: int) -> int:
        _, event = rows[index]
        return seriousness[looks.find_event_kind(event.kind).tone]

    by_seriousness = sorted(range(len(rows)), key=rank_row)
    return [rows[index] for index in sorted(by_seriousness[: looks.MAX_ROWS])]


def render_settings(runs: Sequence[RunData]) -> str:
    """Return each run's configuration, summary and environment as HTML.

    With several runs, a table of their differences comes first.
    """
    parts = []
    if len(runs) > 1:
        rows = [
            f"<th>{escape(name)}</th>"
            + "".join(_render_cell(None if value is None else KeyFigure(name, value)) for value in values)
            for name, values in list_differences(runs)
        ]
        differences = '<p class="about">The runs were configured alike.</p>'
        if rows:
            table = _render_table(f"<th>Setting</th>{_render_run_columns(runs)}", rows)
            differences = f'<div class="card scroll">{table}</div>'
        parts.append(f"<section><h2>Differences</h2>{differences}</section>")
    for index, run in enumerate(runs):
        name = f"{render_swatch(index)}{escape(run.label)}" if len(runs) > 1 else "Run"
        lists = [
            _render_list(
                "Configuration", [(key, format_setting(value)) for key, value in run.config.items()], len(runs) == 1
            ),
            _render_list("Summary", _list_summary(run), len(runs) == 1),
            _render_list(
                "Environment", [(figure.name, figure.value) for figure in list_environment(run)], len(runs) == 1
            ),
            _render_list("Texts", list(run.texts.items()), False),
        ]
        parts.append(f'<section><h2>{name}</h2><div class="grid lists">{"".join(lists)}</div></section>')
    return "\n".join(parts)


def _render_list(title: str, rows: Sequence[tuple[str, str]], is_open: bool) -> str:
    if not rows:
        return ""
    inner = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in rows)
    opened = " open" if is_open and len(rows) <= _MAX_OPEN_SETTINGS else ""
    return f'<details class="card"{opened}><summary>{title} <b>{len(rows)}</b></summary><dl class="rows">{inner}</dl></details>'


def render_sign(kind: looks.EventKind) -> str:
    """Return the sign of a kind of event as SVG."""
    return f'<svg viewBox="-6 -6 12 12" aria-hidden="true"><path class="sign" d="{kind.sign}"/></svg>'


def render_swatch(index: int) -> str:
    """Return a small square in a run's color, as HTML."""
    return f'<i class="swatch c{looks.choose_color(index)} round{index // len(looks.LINE_COLORS) % 4}"></i>'
