"""Decides which series share a chart, in which section, colour and unit.

Draws each chart of a report as a PNG with matplotlib (the `plots` extra).
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from headway.common.optional import require
from headway.errors import ConfigError
from headway.tracking.report import looks
from headway.tracking.report.data import DownsampledSeries, RunData, downsample
from headway.tracking.report.looks import text

MAX_BUCKETS = 1200
"""Buckets of one series; fewer where there are many series."""
ALL_BUCKETS = 60_000
"""Buckets of all series together: what keeps the page at a few megabytes."""
MIN_BUCKETS = 200
SMOOTHING = 0.01
"""How far smoothed lines look, as a share of the series; the page has a slider for it."""


@dataclass(frozen=True)
class ChartLine:
    """One series on a chart.

    Attributes:
        run: which run it is of.
        name: what it is called in the log.
        label: what it is called on its chart.
        colour: the index into the palette.
        is_dotted: drawn with a dot at each value, as few and exact ones are.
        is_dashed: drawn dashed, since it often lies on another one.
        series: its buckets.
    """

    run: int
    name: str
    label: str
    colour: int
    is_dotted: bool
    is_dashed: bool
    series: DownsampledSeries


@dataclass
class Panel:
    """A chart.

    Attributes:
        section: the heading it is listed under.
        title: what it shows.
        unit: "number", "bytes", "share" or "rate".
        from_zero: its axis begins at zero.
        is_wide: it takes the width of the page.
        is_smoothed: its values scatter, so that a smoothed line is drawn over them.
        is_tall: it is higher than the others.
        lines: what is drawn.
    """

    section: str
    title: str
    unit: str = "number"
    from_zero: bool = False
    is_wide: bool = False
    is_smoothed: bool = False
    is_tall: bool = False
    lines: list[ChartLine] = field(default_factory=list)


_KNOWN = (
    (Panel("Training", "Loss", is_smoothed=True, is_tall=True, is_wide=True), ("loss", "train_loss")),
    (Panel("Training", "Learning rate", from_zero=True), ("learning_rate", "lr")),
    (Panel("Training", "Gradient norm", is_smoothed=True, from_zero=True), ("grad_norm", "gradient_norm", "norm")),
    (Panel("Speed", "Samples per second", "rate", True, is_smoothed=True), ("samples_per_second",)),
    (Panel("Speed", "Steps per second", "rate", True, is_smoothed=True), ("steps_per_second",)),
    (Panel("Speed", "Tokens per second", "rate", True, is_smoothed=True), ("tokens_per_second",)),
    (Panel("Speed", "Model FLOPs utilisation", "share", True, is_smoothed=True), ("mfu",)),
    (Panel("Speed", "Time spent waiting for data", "share", True, is_smoothed=True), ("data_wait",)),
)
"""Charts that have a place of their own, with the names of their series; evaluations' losses lie on that of the loss."""
_EVALUATED = re.compile(r"(eval|val|test)(?:uation|id|idation)?[_/](?=.)")
_TRAINED = re.compile(r"train(?:ing)?/(?=.)")
_MEMORY = ("memory", "memory_peak")
_PHASES = ("forward", "backward", "optimizer", "evaluation")


def panels(runs: Sequence[RunData], most: int = MAX_BUCKETS) -> list[Panel]:
    """The charts in the order of the page, of at most so many buckets; a series of one value gets none: `single_values`."""
    names = list(dict.fromkeys(name for run in runs for name in run.series))
    limit = max(MIN_BUCKETS, min(most, ALL_BUCKETS // max(1, sum(len(run.series) for run in runs))))
    drawn = _Drawing(runs, limit)
    roles = {name: role(name) for name in names}
    found = []
    for panel, known in _KNOWN:
        own = "training" if panel.title == "Loss" else ""
        labels = {name: own for name, (kind, rest) in roles.items() if not kind and rest in known}
        if panel.title == "Loss":
            labels |= {name: kind for name, (kind, rest) in roles.items() if kind and rest == "loss"}
        found.append(replace(panel, lines=drawn.lines(labels)))
    placed = {line.name for panel in found for line in panel.lines} | {"epoch"}
    found += _make_memory_panels(drawn, names)
    evaluations: dict[str, dict[str, str]] = {}
    for name, (kind, rest) in roles.items():
        if name in placed or name in _MEMORY or name.startswith("memory/"):
            continue
        if kind:
            evaluations.setdefault(rest, {})[name] = kind
        else:
            section = "Training" if name.endswith("loss") else "More"
            found.append(Panel(section, name, _guess_unit(name), lines=drawn.lines({name: ""}), is_smoothed=True))
    for rest, labels in evaluations.items():
        shown = labels if len(labels) > 1 else dict.fromkeys(labels, "")
        found.append(Panel("Evaluation", rest.replace("_", " ").capitalize(), lines=drawn.lines(shown)))
    found = [panel for panel in found if any(line.series.count > 1 for line in panel.lines)]
    for section in {panel.section for panel in found}:
        narrow = [panel for panel in found if panel.section == section and not panel.is_wide]
        if len(narrow) % 2:
            narrow[-1].is_wide = True  # it would leave a hole beside it
    return found


def role(name: str) -> tuple[str, str]:
    """Which evaluation a value is of ("" for training), and what it is there: ("validation", "loss") for "val/loss"."""
    if found := _EVALUATED.match(name):
        return {"eval": "evaluation", "val": "validation", "test": "test"}[found[1]], name[found.end() :]
    return "", _TRAINED.sub("", name, count=1)


def single_values(runs: Sequence[RunData], drawn: Sequence[Panel]) -> dict[str, list[tuple[float, float] | None]]:
    """By name, each run's (step, value) of what has one value in each run, and so no chart.

    Args:
        runs: the runs.
        drawn: their charts.
    """
    taken = {line.name for panel in drawn for line in panel.lines} | {"epoch"}
    names = dict.fromkeys(name for run in runs for name in run.series if name not in taken)
    return {
        name: [(run.series[name][0][0], run.series[name][0][2]) if name in run.series else None for run in runs]
        for name in names
    }


def _make_memory_panels(drawn: "_Drawing", names: Sequence[str]) -> Iterator[Panel]:
    """By phase on one chart for one run; one chart a phase where each run has its colour."""
    phases = [name.partition("/")[2] for name in names if name.startswith("memory/")]
    ordered = sorted(phases, key=lambda phase: (_PHASES.index(phase) if phase in _PHASES else len(_PHASES), phase))
    # The peak comes last, so that it is drawn over the phase that it was reached in.
    known = {"memory": "in use", **{f"memory/{phase}": phase for phase in ordered}, "memory_peak": "peak"}
    there = set(names)
    present = {name: label for name, label in known.items() if name in there}
    if len(drawn.runs) == 1:
        if present:
            title = "Memory by phase" if ordered else "Memory"
            yield Panel(
                "Memory", title, "bytes", True, is_wide=bool(ordered), is_tall=bool(ordered), lines=drawn.lines(present)
            )
        return
    for name, label in present.items():
        title = f"Memory, {label}" if name in _MEMORY else f"Memory in {label}"
        yield Panel("Memory", title, "bytes", True, lines=drawn.lines({name: ""}))


class _Drawing:
    """Turns names into lines: a colour for each run, or for each line where there is one run."""

    def __init__(self, runs: Sequence[RunData], limit: int) -> None:
        self.runs, self._limit = runs, limit

    def lines(self, names: dict[str, str]) -> list[ChartLine]:
        found = []
        for index, run in enumerate(self.runs):
            for place, (name, label) in enumerate((name, label) for name, label in names.items() if name in run.series):
                series = downsample(run.series[name], self._limit)
                colour = index if len(self.runs) > 1 else place
                is_dotted = bool(role(name)[0]) or series.count == 1
                is_dotted = is_dotted and len(series.means) <= 120
                is_dashed = name == "memory_peak" and len(self.runs) == 1
                found.append(ChartLine(index, name, label, colour, is_dotted, is_dashed, series))
        return found


def _guess_unit(name: str) -> str:
    if name.endswith("_per_second"):
        return "rate"
    return "bytes" if name.endswith("_bytes") else "number"


def across(panels: Sequence[Panel]) -> tuple[float, float]:
    """The ends of the axis of steps, the same for all charts."""
    steps = [end for panel in panels for line in panel.lines for end in (line.series.steps[0], line.series.steps[-1])]
    low, high = min(steps, default=0.0), max(steps, default=1.0)
    if 0 < low < 0.05 * high:
        low = 0.0
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def domain(panel: Panel) -> tuple[float, float]:
    """The ends of a picture's value axis, which cuts off spikes that would press the rest flat."""
    tops = [value for line in panel.lines for value in (line.series.highs or line.series.means) if value is not None]
    lows = [value for line in panel.lines for value in (line.series.lows or line.series.means) if value is not None]
    if not tops:
        return 0.0, 1.0
    lowest, highest = calm(lows, tops)
    # The edge is the furthest value that is kept, not the limit itself.
    high = max(value for value in tops if value <= highest)
    low = min(value for value in lows if value >= lowest)
    return _widen(low, high, panel.from_zero)


def calm(lows: Sequence[float | None], highs: Sequence[float | None]) -> tuple[float, float]:
    """Between which limits values are not spikes: six times the width of the middle eight tenths beyond these."""
    bottom, top = (sorted(value for value in values if value is not None) for values in (lows, highs))
    if len(bottom) < 20:
        return -math.inf, math.inf
    first, last = _quantile(bottom, 0.1), _quantile(top, 0.9)
    spread = max(last - first, 1e-12 * max(abs(first), abs(last)))
    return first - 6 * spread, last + 6 * spread


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[round(share * (len(ordered) - 1))]


def _widen(low: float, high: float, from_zero: bool) -> tuple[float, float]:
    """A little room above and below; never so narrow or wide that floats cannot divide it."""
    low, high = max(low, -1e300), min(high, 1e300)
    if from_zero and low >= 0:
        low = 0.0
    size = max(abs(low), abs(high))
    if high - low <= max(1e-9 * size, 1e-300):
        room = 0.1 * size or 1.0
        return (low if from_zero and low == 0 else low - room), high + room
    room = 0.06 * (high - low)
    return (low if low == 0 else low - room), high + room


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
