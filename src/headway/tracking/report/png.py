"""Draws each chart of a report as a PNG with matplotlib (the `plots` extra)."""

import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from headway.common.optional import require
from headway.errors import ConfigError
from headway.tracking.report import looks
from headway.tracking.report.data import RunData
from headway.tracking.report.looks import text
from headway.tracking.report.panels import MIN_BUCKETS, Panel, across, domain, panels

_TONES = {"bad": "#c62f3b", "warn": "#b26a00", "good": "#00815d", "calm": "#8a8983"}
_MARKS = {"inf": ("^", 1.0), "-inf": ("v", 0.0)}
"""A sign and its height; anything else that is no number is a cross at the top."""


def require_matplotlib() -> ModuleType:
    """matplotlib, set to draw without a window.

    Raises:
        OptionalDependencyMissing: it is not installed.
    """
    package = require("matplotlib", "PNGs of a report need", "headway[plots]")
    package.use("Agg")
    return package


def draw(runs: Sequence[RunData], folder: Path) -> list[Path]:
    """Write one PNG a chart into `folder`, numbered in the order of the page.

    Raises:
        OptionalDependencyMissing: matplotlib is not installed.
        ConfigError: the folder cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    drawn, written = panels(runs, MIN_BUCKETS), []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, panel in enumerate(drawn, 1):
            figure = Figure(figsize=(9.0, 3.6), dpi=160, layout="constrained")
            _draw(figure.add_subplot(), panel, runs, across(drawn))
            slug = re.sub(r"[^a-z0-9]+", "-", panel.title.lower()).strip("-")[:60] or "chart"
            written.append(folder / f"{number:02d}-{slug}.png")
            figure.savefig(written[-1])
    except OSError as error:
        raise ConfigError(
            f"cannot write pictures to {folder} ({error.strerror}); name another folder with --png"
        ) from error
    return written


def _draw(axes: Any, panel: Panel, runs: Sequence[RunData], ends: tuple[float, float]) -> None:
    for line in panel.lines:
        series, shade = line.series, looks.LINES[looks.colour(line.colour)]
        if series.lows:
            axes.fill_between(series.steps, _floats(series.lows), _floats(series.highs), color=shade, alpha=0.18, lw=0)
        label = " · ".join(part for part in (runs[line.run].label if len(runs) > 1 else "", line.label) if part)
        style, marker = "--" if line.is_dashed else "-", "o" if line.is_dotted else None
        means = _floats(series.means)
        axes.plot(series.steps, means, style, color=shade, label=_plain(label) or None, lw=1.5, marker=marker, ms=4)
        for mark in series.marks:
            sign, height = _MARKS.get(mark.kind, ("x", 1.0))
            axes.plot(mark.steps[0], height, sign, color=shade, transform=axes.get_xaxis_transform(), clip_on=False)
    found: dict[tuple[float, str], dict[str, None]] = {}
    for index, run in enumerate(runs):
        for event in looks.drawn(run):
            kind = looks.kind_of(event.kind)
            if kind.has_line:
                shade = looks.LINES[looks.colour(index)] if len(runs) > 1 else _TONES[kind.tone]
                found.setdefault((event.step, shade), {})[_plain(kind.words)] = None
    for (step, shade), words in found.items():
        axes.axvline(step, color=shade, lw=0.8, ls=":")
        place = {"rotation": 90, "ha": "right", "va": "top", "transform": axes.get_xaxis_transform()}
        axes.text(step, 0.98, " · ".join(words), color=shade, fontsize=6.5, **place)
    has_steps = all(run.has_steps for run in runs)
    axes.set(xlim=ends, ylim=domain(panel), xlabel="step" if has_steps else "time")
    axes.xaxis.set_major_formatter(lambda place, _: text(place, "rate" if has_steps else "seconds"))
    axes.yaxis.set_major_formatter(lambda place, _: text(place, "rate" if panel.unit == "number" else panel.unit))
    axes.set_title(_plain(panel.title), loc="left", fontweight="bold")
    axes.grid(axis="y", alpha=0.4)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8, frameon=False)


def _floats(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _plain(label: str) -> str:
    """Without what matplotlib reads as mathematics or as a label to hide."""
    return label.replace("$", r"\$").lstrip("_")
