"""Drawing of a report's charts as PNG files with matplotlib."""

import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from headway.common.optional import require
from headway.core.tracking.report.data import RunData
from headway.core.tracking.report.event_kinds import find_event_kind, select_drawn_events
from headway.core.tracking.report.line_styles import LINE_COLORS, choose_color
from headway.core.tracking.report.number_formats import format_value
from headway.core.tracking.report.panels import (
    MIN_BUCKETS,
    ChartLine,
    Panel,
    build_panels,
    find_step_range,
    find_value_range,
)
from headway.core.tracking.report.progress_axes import Counts, interpolate_count, replace_steps, require_counts
from headway.errors import ConfigError

_TONE_COLORS = {"bad": "#c62f3b", "warn": "#b26a00", "good": "#00815d", "calm": "#8a8983"}
"""Color of an event's line by the event's tone, as in `style.css`. With several runs, the line has the run's color."""
_MARKS = {"inf": ("^", 1.0), "-inf": ("v", 0.0)}
"""Marker and relative height for infinite values. Any other non-finite value is drawn as a cross at the top."""


def require_matplotlib() -> ModuleType:
    """Return matplotlib, configured to draw without a window.

    Raises:
        OptionalDependencyMissing: If matplotlib is not installed.
    """
    package = require("matplotlib", "PNGs of a report need", "headway[plots]")
    package.use("Agg")
    return package


def draw_charts(runs: Sequence[RunData], folder: Path, axis: str = "step") -> list[Path]:
    """Write one PNG file per chart into `folder`, and return their paths.

    The files are numbered in the order of the charts on the report's page.

    Args:
        runs: Runs of the report.
        folder: Folder for the files.
        axis: Horizontal axis: "step", "tokens" or "samples". Runs without steps are drawn over time. Default: "step".

    Raises:
        OptionalDependencyMissing: If matplotlib is not installed.
        ConfigError: If the folder cannot be written, or a run has no counts of tokens or samples for the axis.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    counts = None if axis == "step" else require_counts(runs, axis)
    panels = build_panels(runs, MIN_BUCKETS)
    if counts is not None:
        panels = replace_steps(panels, counts)
    elif not all(run.has_steps for run in runs):
        axis = "time"
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, panel in enumerate(panels, 1):
            figure = Figure(figsize=(9.0, 3.6), dpi=160, layout="constrained")
            axes = figure.add_subplot()
            _draw_chart(axes, panel, runs, axis, find_step_range(panels))
            _draw_event_lines(axes, runs, counts)
            slug = re.sub(r"[^a-z0-9]+", "-", panel.title.lower()).strip("-")[:60] or "chart"
            paths.append(folder / f"{number:02d}-{slug}.png")
            figure.savefig(paths[-1])
    except OSError as error:
        raise ConfigError(
            f"cannot write pictures to {folder} ({error.strerror}); name another folder with --png"
        ) from error
    return paths


def _draw_chart(axes: Any, panel: Panel, runs: Sequence[RunData], axis: str, axis_range: tuple[float, float]) -> None:
    """Draw one chart on matplotlib axes, without the events of the runs.

    Args:
        axes: matplotlib's `Axes`.
        panel: Chart to draw.
        runs: Runs of the report. The lines of the chart refer to them by index.
        axis: Name of the horizontal axis: "step", "time", "tokens" or "samples".
        axis_range: First and last value of the horizontal axis: steps, seconds, tokens or samples.
    """
    for line in panel.lines:
        run_label = runs[line.run].label if len(runs) > 1 else ""
        _draw_line(axes, line, label=" · ".join(part for part in (run_label, line.label) if part))
    axes.set(xlim=axis_range, ylim=find_value_range(panel), xlabel=axis)
    axis_unit = "seconds" if axis == "time" else "rate"
    value_unit = "rate" if panel.unit == "number" else panel.unit
    axes.xaxis.set_major_formatter(lambda value, _: format_value(value, axis_unit))
    axes.yaxis.set_major_formatter(lambda value, _: format_value(value, value_unit))
    axes.set_title(_escape_label(panel.title), loc="left", fontweight="bold")
    axes.grid(axis="y", alpha=0.4)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8, frameon=False)


def _draw_line(axes: Any, line: ChartLine, label: str) -> None:
    """Draw a series: its means as a line, the range of its values as an area, and its marks.

    Args:
        axes: Axes of matplotlib.
        line: Line of a chart.
        label: Text for the legend; "" for none.
    """
    series, color = line.series, LINE_COLORS[choose_color(line.color)]
    if series.lows:
        lows, highs = _to_floats(series.lows), _to_floats(series.highs)
        axes.fill_between(series.steps, lows, highs, color=color, alpha=0.18, lw=0)
    axes.plot(
        series.steps,
        _to_floats(series.means),
        "--" if line.is_dashed else "-",
        color=color,
        label=_escape_label(label) or None,
        lw=1.5,
        marker="o" if line.is_dotted else None,
        ms=4,
    )
    for mark in series.marks:
        sign, height = _MARKS.get(mark.kind, ("x", 1.0))
        axes.plot(mark.steps[0], height, sign, color=color, transform=axes.get_xaxis_transform(), clip_on=False)


def _draw_event_lines(axes: Any, runs: Sequence[RunData], counts: Sequence[Counts] | None) -> None:
    """Draw a labeled vertical line for each event with a line. Events of one color at one position share a line.

    Args:
        axes: Axes of matplotlib.
        runs: Runs of the report.
        counts: Counts of tokens or samples of each run, by which events are placed. None: by steps.
    """
    labels: dict[tuple[float, str], dict[str, None]] = {}  # ordered sets of texts, by position and color
    for index, run in enumerate(runs):
        for event in select_drawn_events(run):
            kind = find_event_kind(event.kind)
            if kind.has_line:
                color = LINE_COLORS[choose_color(index)] if len(runs) > 1 else _TONE_COLORS[kind.tone]
                position = event.step if counts is None else interpolate_count(counts[index], event.step)
                labels.setdefault((position, color), {})[_escape_label(kind.label)] = None
    for (position, color), texts in labels.items():
        axes.axvline(position, color=color, lw=0.8, ls=":")
        placement = {"rotation": 90, "ha": "right", "va": "top", "transform": axes.get_xaxis_transform()}
        axes.text(position, 0.98, " · ".join(texts), color=color, fontsize=6.5, **placement)


def _to_floats(values: Sequence[float | None]) -> list[float]:
    """Return values with NaN, where matplotlib draws a gap, in place of None."""
    return [float("nan") if value is None else value for value in values]


def _escape_label(label: str) -> str:
    """Return the label as text for matplotlib, with dollar signs escaped and leading underscores removed.

    Dollar signs would start math mode, and a leading underscore would hide the label in the legend.
    """
    return label.replace("$", r"\$").lstrip("_")
