"""The tables of the page: figures at a glance, events, differences of settings, and each run's own lists."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from headway.tracking.report import facts, looks
from headway.tracking.report.data import PlacedEvent, RunData
from headway.tracking.report.downsample import DownsampledSeries
from headway.tracking.report.numbers import duration, text
from headway.tracking.report.panels import Panel

_MANY_SETTINGS = 24
"""Longer lists are closed at first."""


def overview(runs: Sequence[RunData]) -> str:
    """Tiles for one run, a table for several."""
    if len(runs) == 1:
        return tiles(facts.headline(runs[0]))
    found = [{fact.name: fact for fact in facts.headline(run)} for run in runs]
    names = list(dict.fromkeys(name for table in found for name in table))
    rows = []
    for index, (run, table) in enumerate(zip(runs, found, strict=True)):
        state = facts.state(run)
        pill = f'<span class="pill {state.tone}" title="{escape(state.note)}">{state.word}</span>'
        cells = "".join(_render_cell(table.get(name)) for name in names)
        rows.append(f"<th>{swatch(index)}{escape(run.label)}</th><td>{pill}</td>{cells}")
    head = "".join(f"<th>{escape(name)}</th>" for name in ("Run", "State", *names))
    return f'<div class="card scroll figures">{_render_table(head, rows)}</div>'


def tiles(figures: Sequence[facts.Fact]) -> str:
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


def _render_cell(fact: facts.Fact | None) -> str:
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
            cells += _render_cell(None if each is None else facts.Fact(name, facts.figure(name, each[1]), note))
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
            + "".join(_render_cell(None if value is None else facts.Fact(name, value)) for value in values)
            for name, values in facts.differences(runs)
        ]
        table = _render_table(f"<th>Setting</th>{_render_run_columns(runs)}", rows)
        shown = (
            f'<div class="card scroll">{table}</div>'
            if rows
            else '<p class="about">The runs were configured alike.</p>'
        )
        parts.append(f"<section><h2>Differences</h2>{shown}</section>")
    for index, run in enumerate(runs):
        name = f"{swatch(index)}{escape(run.label)}" if len(runs) > 1 else "Run"
        lists = [
            _render_list(
                "Configuration", [(key, facts.written(value)) for key, value in run.config.items()], len(runs) == 1
            ),
            _render_list(
                "Summary", [(key, facts.figure(key, value)) for key, value in run.summary.items()], len(runs) == 1
            ),
            _render_list("Environment", [(fact.name, fact.value) for fact in facts.environment(run)], len(runs) == 1),
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
