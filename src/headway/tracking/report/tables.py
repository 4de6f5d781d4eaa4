"""What a page says in words and tables: a run's state, figures at a glance, events, differences of settings.

What is said of a run in words and numbers: its state, how long, how fast, how good; and how configurations differ.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from statistics import median
from typing import Any

from headway.tracking.report import looks
from headway.tracking.report.data import DownsampledSeries, PlacedEvent, RunData
from headway.tracking.report.looks import duration, kind_of, text
from headway.tracking.report.panels import Panel, role

_FRESH = 120.0
"""Seconds of silence after which a run without an end is hardly alive."""


@dataclass(frozen=True)
class Fact:
    """One figure.

    Attributes:
        name: what it is.
        value: as text.
        note: what it means, or where it was; may be empty.
    """

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class RunStatus:
    """The state of a run.

    Attributes:
        word: "finished", "preempted", "cut off" or "no end".
        tone: "good", "warn" or "bad".
        note: why it is thought to be so.
    """

    word: str
    tone: str
    note: str


def run_state(run: RunData) -> RunStatus:
    """Finished or not, as far as a log can tell."""
    if run.is_finished:
        return RunStatus("finished", "good", "")
    silence = f"its last line was written {duration(run.silent_for)} before this page was made"
    if run.is_torn:
        return RunStatus("cut off", "bad", f"killed in the middle of a line; {silence}")
    kinds = [event.kind for event in run.events]
    if kinds and "preempted" in kinds and kinds[-1] not in ("resumed", "restart"):
        return RunStatus("preempted", "warn", f"it was asked to stop and has not been resumed; {silence}")
    if run.silent_for < _FRESH:
        return RunStatus("no end yet", "warn", f"still running, or stopped just now; {silence}")
    return RunStatus("no end", "bad", f"killed, or still running but silent; {silence}")


def moment(seconds: float) -> str:
    """A time of day, in this machine's zone."""
    try:
        return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    except (ValueError, OverflowError, OSError):  # a log may claim any number
        return f"{seconds:g} s after 1970"


def headline(run: RunData) -> list[Fact]:
    """The few figures that people look for first."""
    found = []
    if run.last_step is not None:
        found.append(Fact("Updates", text(run.last_step)))
    attempts = f"{len(run.starts)} attempts" if len(run.starts) > 1 else ""
    found.append(Fact("Duration", duration(run.seconds), attempts))
    own = next((name for name in run.series if role(name) == ("", "loss")), "loss")
    if losses := _select_finite(run, own):
        tail = losses[-max(1, len(losses) // 50) :]
        note = f"from {text(losses[0])}" if len(losses) > 1 else ""
        note += f", mean of the last {len(tail)}" if len(tail) > 1 else ""
        found.append(Fact("Training loss", text(sum(tail) / len(tail)), note))
    kinds = {
        kind: series for name, series in run.series.items() for kind, rest in (role(name),) if kind and rest == "loss"
    }
    for kind, series in kinds.items():
        if evaluated := [point for point in series if abs(point[2]) < float("inf")]:
            best = min(evaluated, key=lambda point: point[2])
            found.append(Fact(f"Best {kind} loss", text(best[2]), f"at step {text(best[0])}" if run.has_steps else ""))
    for name, title, unit in (
        ("samples_per_second", "Samples/s", "rate"),
        ("tokens_per_second", "Tokens/s", "rate"),
        ("mfu", "FLOPs utilisation", "share"),
        ("data_wait", "Waiting for data", "share"),
    ):
        if values := _select_finite(run, name):
            found.append(Fact(title, text(median(values), unit), "median"))
    peaks = [value for name in run.series if name.startswith("memory") for value in _select_finite(run, name)]
    if peaks:
        found.append(Fact("Peak memory", text(max(peaks), "bytes")))
    troubles = Counter(event.kind for event in run.events if kind_of(event.kind).tone in ("bad", "warn"))
    if troubles:
        what = ", ".join(f"{count} {kind_of(kind).words}" for kind, count in troubles.most_common())
        found.append(Fact("Incidents", str(troubles.total()), what))
    return found


def environment(run: RunData) -> list[Fact]:
    """Where it ran."""
    found = [Fact("Began", moment(run.began)), Fact("Last line", moment(run.began + run.seconds))]
    found += [Fact("Project", run.project)] if run.project else []
    if run.starts:
        last = run.starts[-1]
        worlds = list(dict.fromkeys(start.world_size for start in run.starts))
        devices = list(dict.fromkeys(start.device for start in run.starts))
        found.append(Fact("Processes", " → ".join(map(str, worlds))))
        found.append(Fact("Device", " → ".join(devices)))
        found.append(Fact("Attempts", str(len(run.starts))))
        found += [Fact(name, str(version)) for name, version in last.versions.items()]
    if run.damaged:
        found.append(Fact("Unreadable lines", ", ".join(map(str, run.damaged[:10])), "left out"))
    found.append(Fact("Log", str(run.path)))
    return found


def differences(runs: Sequence[RunData]) -> list[tuple[str, list[str | None]]]:
    """The settings, processes, device and versions in which runs are not alike: name, and each run's value."""
    tables = [{**run.config, **_list_circumstances(run)} for run in runs]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [(name, [written(table[name]) if name in table else None for table in tables]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _list_circumstances(run: RunData) -> dict[str, Any]:
    if not run.starts:
        return {}
    last = run.starts[-1]
    versions = {f"version of {name}": version for name, version in last.versions.items()}
    return {"processes": last.world_size, "device": last.device, **versions}


def written(value: Any) -> str:
    """A setting as text: a string as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def figure(name: str, value: Any) -> str:
    """A number of the summary, in the unit that its name tells."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return written(value)
    is_bytes = name.endswith("bytes") or "memory" in name
    is_seconds = name.endswith(("runtime", "_seconds"))
    return text(value, "bytes" if is_bytes else "seconds" if is_seconds else "number")


def _select_finite(run: RunData, name: str) -> list[float]:
    return [value for _, _, value in run.series.get(name, []) if abs(value) < float("inf")]


_MANY_SETTINGS = 24
"""Longer lists are closed at first."""


def overview(runs: Sequence[RunData]) -> str:
    """Tiles for one run, a table for several."""
    if len(runs) == 1:
        return tiles(headline(runs[0]))
    found = [{fact.name: fact for fact in headline(run)} for run in runs]
    names = list(dict.fromkeys(name for table in found for name in table))
    rows = []
    for index, (run, table) in enumerate(zip(runs, found, strict=True)):
        state = run_state(run)
        pill = f'<span class="pill {state.tone}" title="{escape(state.note)}">{state.word}</span>'
        cells = "".join(_render_cell(table.get(name)) for name in names)
        rows.append(f"<th>{swatch(index)}{escape(run.label)}</th><td>{pill}</td>{cells}")
    head = "".join(f"<th>{escape(name)}</th>" for name in ("Run", "State", *names))
    return f'<div class="card scroll figures">{_render_table(head, rows)}</div>'


def tiles(figures: Sequence[Fact]) -> str:
    """Figures in rows of six at most."""
    cells = "".join(
        f"<div><dt>{escape(fact.name)}</dt><dd>{escape(fact.value)}<small>{escape(fact.note)}</small></dd></div>"
        for fact in figures
    )
    num_rows = -(-len(figures) // 6) or 1
    return f'<dl class="tiles" style="--columns:{-(-len(figures) // num_rows) or 1}">{cells}</dl>'


def _render_table(head: str, rows: Iterable[str]) -> str:
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _render_run_columns(runs: Sequence[RunData]) -> str:
    return "".join(f"<th>{swatch(index)}{escape(run.label)}</th>" for index, run in enumerate(runs))


def _render_cell(fact: Fact | None) -> str:
    if fact is None:
        return '<td class="none">-</td>'
    note = f"<small>{escape(fact.note)}</small>" if fact.note else ""
    return f"<td>{escape(fact.value)}{note}</td>"


def single_values(runs: Sequence[RunData], values: Mapping[str, Sequence[tuple[float, float] | None]]) -> str:
    """What was logged once, as figures: a row for each name, a column for each run."""
    if not values:
        return ""
    rows = []
    for name, found in values.items():
        cells = ""
        for run, each in zip(runs, found, strict=True):
            note = f"step {text(each[0])}" if each is not None and run.has_steps else ""
            cells += _render_cell(None if each is None else Fact(name, figure(name, each[1]), note))
        rows.append(f"<th>{escape(name)}</th>{cells}")
    head = f"<th>Name</th>{_render_run_columns(runs) if len(runs) > 1 else '<th>Value</th>'}"
    return (
        f'<section><h2>Single values</h2><div class="card scroll figures">{_render_table(head, rows)}</div></section>'
    )


def values_of(panel: Panel, runs: Sequence[RunData]) -> str:
    """A chart's lines in figures, for readers whose browser runs no script: where each begins, its extremes, where it ends."""
    rows = []
    for line in panel.lines:
        name = " · ".join(part for part in (runs[line.run].label if len(runs) > 1 else "", line.label) if part)
        cells = "".join(f"<td>{text(value, panel.unit)}</td>" for value in _summarize(line.series))
        not_finite = sum(mark.count for mark in line.series.marks)
        rows.append(
            f"<th>{swatch(line.run) if len(runs) > 1 else ''}{escape(name or panel.title)}</th>{cells}"
            f"<td>{line.series.count:,}</td><td>{not_finite or '-'}</td>"
        )
    columns = ("Line", "First", "Lowest", "Highest", "Last", "Values", "Not finite")
    return f'<div class="scroll">{_render_table("".join(f"<th>{name}</th>" for name in columns), rows)}</div>'


def _summarize(series: DownsampledSeries) -> tuple[float | None, ...]:
    known = [value for value in series.means if value is not None]
    low, high = series.bounds() or (None, None)
    return (known[0], low, high, known[-1]) if known else (None, None, None, None)


def event_table(runs: Sequence[RunData]) -> str:
    """All events, run by run in the order of time."""
    rows = [(index, event) for index, run in enumerate(runs) for event in run.events]
    if not rows:
        return ""
    shown = rows if len(rows) <= looks.MAX_ROWS else _select_rows(rows)
    lines = []
    for index, event in shown:
        kind = looks.kind_of(event.kind)
        name = f"<td>{swatch(index)}{escape(runs[index].label)}</td>" if len(runs) > 1 else ""
        step = text(event.step) if event.has_step else "-"
        lines.append(
            f'{name}<td class="number">{step}</td><td class="number">{duration(event.seconds)}</td>'
            f'<td><span class="event {kind.tone}">{sign(kind)}{escape(kind.words)}</span></td>'
            f'<td class="details">{escape(looks.details(event.details))}</td>'
        )
    head = "<th>Run</th>" if len(runs) > 1 else ""
    head += '<th class="number">Step</th><th class="number">After</th><th>Event</th><th>Details</th>'
    left = f'<p class="about">{len(rows) - len(shown):,} more are not listed.</p>' if len(shown) < len(rows) else ""
    is_open = " open" if len(shown) <= 30 else ""
    count = f"{len(rows):,} event{'s' if len(rows) > 1 else ''}"
    return (
        f'<section><h2>Events</h2><details class="card scroll"{is_open}><summary>{count}</summary>'
        f"{_render_table(head, lines)}{left}</details></section>"
    )


def _select_rows(rows: list[tuple[int, PlacedEvent]]) -> list[tuple[int, PlacedEvent]]:
    """Trouble first, then what is usual, in the order of the runs."""
    ranks = {"bad": 0, "warn": 1, "good": 2, "calm": 3}
    chosen = sorted(range(len(rows)), key=lambda number: ranks[looks.kind_of(rows[number][1].kind).tone])
    return [rows[number] for number in sorted(chosen[: looks.MAX_ROWS])]


def settings(runs: Sequence[RunData]) -> str:
    """In what several runs differ; then each run's configuration, summary and environment."""
    parts = []
    if len(runs) > 1:
        rows = [
            f"<th>{escape(name)}</th>"
            + "".join(_render_cell(None if value is None else Fact(name, value)) for value in values)
            for name, values in differences(runs)
        ]
        shown = '<p class="about">The runs were configured alike.</p>'
        if rows:
            table = _render_table(f"<th>Setting</th>{_render_run_columns(runs)}", rows)
            shown = f'<div class="card scroll">{table}</div>'
        parts.append(f"<section><h2>Differences</h2>{shown}</section>")
    for index, run in enumerate(runs):
        name = f"{swatch(index)}{escape(run.label)}" if len(runs) > 1 else "Run"
        lists = [
            _render_list("Configuration", [(key, written(value)) for key, value in run.config.items()], len(runs) == 1),
            _render_list("Summary", [(key, figure(key, value)) for key, value in run.summary.items()], len(runs) == 1),
            _render_list("Environment", [(fact.name, fact.value) for fact in environment(run)], len(runs) == 1),
            _render_list("Texts", list(run.texts.items()), False),
        ]
        parts.append(f'<section><h2>{name}</h2><div class="grid lists">{"".join(lists)}</div></section>')
    return "\n".join(parts)


def _render_list(title: str, rows: Sequence[tuple[str, str]], is_open: bool) -> str:
    if not rows:
        return ""
    inner = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in rows)
    opened = " open" if is_open and len(rows) <= _MANY_SETTINGS else ""
    return f'<details class="card"{opened}><summary>{title} <b>{len(rows)}</b></summary><dl class="rows">{inner}</dl></details>'


def sign(kind: looks.EventKind) -> str:
    """A kind's sign, in its colour."""
    return f'<svg viewBox="-6 -6 12 12" aria-hidden="true"><path class="sign" d="{kind.sign}"/></svg>'


def swatch(index: int) -> str:
    """A small square in a run's colour."""
    return f'<i class="swatch c{looks.colour(index)} round{index // len(looks.LINES) % 4}"></i>'
