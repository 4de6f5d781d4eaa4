"""Drawing of a report's charts as PNG files with matplotlib."""

import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from headway.common.optional import require
from headway.core.tracking.report import looks
from headway.core.tracking.report.data import RunData
from headway.core.tracking.report.looks import format_value
from headway.core.tracking.report.panels import MIN_BUCKETS, Panel, build_panels, find_step_range, find_value_range
from headway.errors import ConfigError

_TONES = {"bad": "#c62f3b", "warn": "#b26a00", "good": "#00815d", "calm": "#8a8983"}
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


def draw_charts(runs: Sequence[RunData], folder: Path) -> list[Path]:
    """Write one PNG file per chart into `folder`, and return their paths.

    The files are numbered in the order of the charts on the report's page.

    Args:
        runs: Runs of the report.
        folder: Folder for the files.

    Raises:
        OptionalDependencyMissing: If matplotlib is not installed.
        ConfigError: If the folder cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    drawn, written = build_panels(runs, MIN_BUCKETS), []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, panel in enumerate(drawn, 1):
            figure = Figure(figsize=(9.0, 3.6), dpi=160, layout="constrained")
            _draw_chart(figure.add_subplot(), panel, runs, find_step_range(drawn))
            slug = re.sub(r"[^a-z0-9]+", "-", panel.title.lower()).strip("-")[:60] or "chart"
            written.append(folder / f"{number:02d}-{slug}.png")
            figure.savefig(written[-1])
    except OSError as error:
        raise ConfigError(
            f"cannot write pictures to {folder} ({error.strerror}); name another folder with --png"
        ) from error
    return written


def _draw_chart(axes: Any, panel: Panel, runs: Sequence[RunData], ends: tuple[float, float]) -> None:
    for line in panel.lines:
        series, shade = line.series, looks.LINES[looks.choose_color(line.color)]
        if series.lows:
            axes.fill_between(
                series.steps, _to_floats(series.lows), _to_floats(series.highs), color=shade, alpha=0.18, lw=0
            )
        label = " · ".join(part for part in (runs[line.run].label if len(runs) > 1 else "", line.label) if part)
        style, marker = "--" if line.is_dashed else "-", "o" if line.is_dotted else None
        means = _to_floats(series.means)
        axes.plot(
            series.steps, means, style, color=shade, label=_escape_label(label) or None, lw=1.5, marker=marker, ms=4
        )
        for mark in series.marks:
            sign, height = _MARKS.get(mark.kind, ("x", 1.0))
            axes.plot(mark.steps[0], height, sign, color=shade, transform=axes.get_xaxis_transform(), clip_on=False)
    found: dict[tuple[float, str], dict[str, None]] = {}
    for index, run in enumerate(runs):
        for event in looks.select_drawn_events(run):
            kind = looks.find_kind(event.kind)
            if kind.has_line:
                shade = looks.LINES[looks.choose_color(index)] if len(runs) > 1 else _TONES[kind.tone]
                found.setdefault((event.step, shade), {})[_escape_label(kind.words)] = None
    for (step, shade), words in found.items():
        axes.axvline(step, color=shade, lw=0.8, ls=":")
        place = {"rotation": 90, "ha": "right", "va": "top", "transform": axes.get_xaxis_transform()}
        axes.text(step, 0.98, " · ".join(words), color=shade, fontsize=6.5, **place)
    has_steps = all(run.has_steps for run in runs)
    axes.set(xlim=ends, ylim=find_value_range(panel), xlabel="step" if has_steps else "time")
    axes.xaxis.set_major_formatter(lambda place, _: format_value(place, "rate" if has_steps else "seconds"))
    axes.yaxis.set_major_formatter(
        lambda place, _: format_value(place, "rate" if panel.unit == "number" else panel.unit)
    )
    axes.set_title(_escape_label(panel.title), loc="left", fontweight="bold")
    axes.grid(axis="y", alpha=0.4)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8, frameon=False)


def _to_floats(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _escape_label(label: str) -> str:
    """Return the label as text for matplotlib, with dollar signs escaped and leading underscores removed.

    Dollar signs would start math mode, and a leading underscore would hide the label in the legend.
    """
    return label.replace("$", r"\$").lstrip("_")
