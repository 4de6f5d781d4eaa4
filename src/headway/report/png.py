"""Draws each chart of a report as a PNG with matplotlib (the `plots` extra)."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from headway.errors import ConfigError
from headway.optional import require
from headway.report import looks
from headway.report.data import RunData
from headway.report.looks import LINES, colour
from headway.report.numbers import text
from headway.report.panels import SMOOTHING, Panel, across, domain, panels
from headway.report.reduce import smooth

_INK, _SOFT, _GRID = "#1d1d1f", "#6b6a66", "#e9e8e4"
_TONES = {"bad": "#c62f3b", "warn": "#b26a00", "good": "#00815d", "calm": "#8a8983"}
_DPI = 160


def require_matplotlib() -> ModuleType:
    """matplotlib, set to draw without a window.

    Raises:
        OptionalDependencyMissing: it is not installed.
    """
    package = require("matplotlib", "PNGs of a report need", "headway[plots]")
    package.use("Agg")
    return package


def draw(runs: Sequence[RunData], folder: Path) -> list[Path]:
    """Write one PNG a chart into `folder`, numbered in the order of the page, on white.

    Raises:
        OptionalDependencyMissing: matplotlib is not installed.
        ConfigError: the folder cannot be written.
    """
    require_matplotlib()
    drawn = panels(runs)
    ends = across(drawn)
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, panel in enumerate(drawn, 1):
            path = folder / f"{number:02d}-{_slug(panel.title)}.png"
            _save(panel, runs, ends, path)
            written.append(path)
    except OSError as error:
        raise ConfigError(
            f"cannot write pictures to {folder} ({error.strerror}); name another folder with --png"
        ) from error
    return written


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:60] or "chart"


def _save(panel: Panel, runs: Sequence[RunData], ends: tuple[float, float], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.6), dpi=_DPI, layout="constrained", facecolor="white")
    axes: Any = figure.add_subplot()
    up = domain(panel)
    for line in panel.lines:
        _line(axes, line, panel.is_smoothed, _label(line, runs), up)
    unit = "step" if all(run.has_steps for run in runs) else "seconds"
    _axis(axes, ends, up, panel.unit, unit)
    _events(axes, runs)
    axes.set_title(_plain(panel.title), loc="left", fontsize=11, fontweight="bold", color=_INK, pad=16)
    if any(_label(line, runs) for line in panel.lines):
        # To the right of the title, above the signs of events; many labels would cover it.
        above: dict[str, Any] = {
            "loc": "lower right",
            "bbox_to_anchor": (1, 1.035),
            "borderaxespad": 0,
            "frameon": False,
        }
        place = above if len(panel.lines) <= 4 else {"loc": "best"}
        axes.legend(ncols=2 if len(panel.lines) > 4 else 4, fontsize=8, labelcolor=_SOFT, **place)
    figure.savefig(path)


def _label(line: Any, runs: Sequence[RunData]) -> str:
    parts = [runs[line.run].label if len(runs) > 1 else "", line.label]
    return _plain(" · ".join(part for part in parts if part))


def _plain(text: str) -> str:
    """Without what matplotlib reads as mathematics or as a label to hide."""
    return text.replace("$", r"\$").lstrip("_")


def _line(axes: Any, line: Any, is_smoothed: bool, label: str, up: tuple[float, float]) -> None:
    series, shade = line.series, LINES[colour(line.colour)]
    means = series.means
    if is_smoothed and not line.is_dotted:
        means = smooth(means, SMOOTHING)
    nan = float("nan")
    if series.lows:
        lows, highs = ([nan if value is None else value for value in values] for values in (series.lows, series.highs))
        axes.fill_between(series.steps, lows, highs, color=shade, alpha=0.18, linewidth=0)
    elif means != series.means:
        axes.plot(
            series.steps,
            [nan if value is None else value for value in series.means],
            color=shade,
            alpha=0.3,
            linewidth=0.7,
        )
    axes.plot(
        series.steps,
        [nan if value is None else value for value in means],
        color=shade,
        label=label or None,
        linewidth=1.5,
        marker="o" if line.is_dotted else None,
        markersize=4,
        linestyle="--" if line.is_dashed else "-",
    )
    for mark in series.marks:
        sign, height = ("v", up[0]) if mark.kind == "-inf" else ("^" if mark.kind == "inf" else "x", up[1])
        axes.plot([mark.steps[0]], [height], sign, color=shade, markersize=6, clip_on=False)


def _axis(axes: Any, ends: tuple[float, float], up: tuple[float, float], unit: str, unit_across: str) -> None:
    axes.set_xlim(*ends)
    axes.set_ylim(*up)
    for axis, limits, kind, most in ((axes.xaxis, ends, unit_across, 8), (axes.yaxis, up, unit, 5)):
        axis.set_major_locator(_places(limits, kind, most))
        axis.set_major_formatter(
            lambda place, _, kind=kind: text(place, "rate" if kind in ("number", "step") else kind)
        )
    axes.tick_params(length=0, labelsize=8, labelcolor=_SOFT)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_GRID)
    if unit_across == "step":
        axes.set_xlabel("step", fontsize=8, color=_SOFT)


def _places(limits: tuple[float, float], unit: str, most: int) -> Any:
    from matplotlib.ticker import MaxNLocator, MultipleLocator

    distance = (limits[1] - limits[0]) / most
    if unit == "bytes" and distance >= 1:
        return MultipleLocator(2.0 ** math.ceil(math.log2(distance)))
    return MaxNLocator(most, integer=unit == "step")


def _events(axes: Any, runs: Sequence[RunData]) -> None:
    shown = []
    for index, run in enumerate(runs):
        for event in looks.drawn(run):
            kind = looks.kind_of(event.kind)
            if not kind.has_line:
                continue
            shade = LINES[colour(index)] if len(runs) > 1 else _TONES[kind.tone]
            axes.axvline(event.step, color=shade, linewidth=0.8, linestyle=":", zorder=1)
            shown.append((event.step, kind.words, shade))
    low, high = axes.get_xlim()
    for step, words, shade in _apart(sorted(shown), 0.1 * (high - low)):
        place = (step - low) / (high - low)
        axes.annotate(
            words,
            (step, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            fontsize=6.5,
            color=shade,
            ha="left" if place < 0.1 else "right" if place > 0.9 else "center",
            va="bottom",
            annotation_clip=True,
        )


def _apart(shown: Sequence[tuple[float, str, str]], distance: float) -> list[tuple[float, str, str]]:
    """Words that stand too near to one another, put together at the first one's place."""
    groups: list[list[tuple[float, str, str]]] = []
    for each in shown:
        if groups and each[0] - groups[-1][0][0] < distance:
            groups[-1].append(each)
        else:
            groups.append([each])
    return [(group[0][0], " · ".join(dict.fromkeys(words for _, words, _ in group)), group[0][2]) for group in groups]
