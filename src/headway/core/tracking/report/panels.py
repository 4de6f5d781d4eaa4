"""Charts of a report: group the logged series into charts with sections, colors and units."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from headway.core.tracking.report.data import RunData
from headway.core.tracking.report.series import DownsampledSeries, downsample

MAX_BUCKETS = 1200
"""Maximum number of buckets of one series. Fewer are used if there are many series."""
ALL_BUCKETS = 60_000
"""Maximum number of buckets of all series together, which limits the page to a few megabytes."""
MIN_BUCKETS = 200
SMOOTHING = 0.05
"""Default width of the smoothing window, as a fraction of the series. A slider on the page changes it."""
_EVALUATED = re.compile(r"(eval|val|test)(?:uation|id|idation)?[_/](?=.)")
_TRAINED = re.compile(r"train(?:ing)?/(?=.)")
_MEMORY = ("memory", "memory_peak")
_PHASES = ("forward", "backward", "optimizer", "evaluation")


@dataclass(frozen=True)
class ChartLine:
    """One series on a chart.

    Attributes:
        run: Index of the run that logged the series.
        name: Name of the value in the log.
        label: Name on the chart.
        color: Index of the line's color. `looks.choose_color` turns it into an index of `looks.LINES`.
        is_dotted: Whether each value is drawn with a dot, as in short series such as evaluations.
        is_dashed: Whether the line is dashed, because it often covers another one.
        series: Downsampled values.
    """

    run: int
    name: str
    label: str
    color: int
    is_dotted: bool
    is_dashed: bool
    series: DownsampledSeries


@dataclass
class Panel:
    """One chart.

    Attributes:
        section: Heading above the chart.
        title: Title of the chart.
        unit: "number", "bytes", "share" or "rate".
        from_zero: Whether the value axis starts at zero.
        is_wide: Whether the chart has the full width of the page.
        is_smoothed: Whether a smoothed line is drawn over the values, because they are noisy.
        is_tall: Whether the chart is taller than the others.
        lines: Lines of the chart.
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
    (Panel("Speed", "Model FLOPs utilization", "share", True, is_smoothed=True), ("mfu",)),
    (Panel("Speed", "Time spent waiting for data", "share", True, is_smoothed=True), ("data_wait",)),
)
"""Charts for well-known series, with the names of these series. Evaluation losses are drawn on the loss chart."""

WAIT_BY_RANK = "data_wait/rank_"
"""Name prefix, before the rank's number, of the series with the fraction of time that a rank waited for data."""


def build_panels(runs: Sequence[RunData], most: int = MAX_BUCKETS) -> list[Panel]:
    """Return the charts of a report. A chart on which each series has a single value is left out.

    `select_single_values` returns these values.

    Args:
        runs: Runs of the report.
        most: Maximum number of buckets per series. Fewer are used if there are many series, but at least `MIN_BUCKETS`.
            Default: `MAX_BUCKETS`.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.series))
    limit = max(MIN_BUCKETS, min(most, ALL_BUCKETS // max(1, sum(len(run.series) for run in runs))))
    drawn = _Drawing(runs, limit)
    roles = {name: split_role(name) for name in names}
    found = []
    for panel, known in _KNOWN:
        own = "training" if panel.title == "Loss" else ""
        labels = {name: own for name, (kind, rest) in roles.items() if not kind and rest in known}
        if panel.title == "Loss":
            labels |= {name: kind for name, (kind, rest) in roles.items() if kind and rest == "loss"}
        found.append(replace(panel, lines=drawn.make_lines(labels)))
    placed = {line.name for panel in found for line in panel.lines} | {"epoch"}
    waits = {name: name.removeprefix(WAIT_BY_RANK) for name in names if name.startswith(WAIT_BY_RANK)}
    title = "Time spent waiting for data, by rank"
    found.append(Panel("Speed", title, "share", True, is_smoothed=True, lines=drawn.make_lines(waits)))
    placed |= set(waits)
    found += _make_memory_panels(drawn, names)
    evaluations: dict[str, dict[str, str]] = {}
    for name, (kind, rest) in roles.items():
        if name in placed or name in _MEMORY or name.startswith("memory/"):
            continue
        if kind:
            evaluations.setdefault(rest, {})[name] = kind
        else:
            section = "Training" if name.endswith("loss") else "More"
            found.append(Panel(section, name, _guess_unit(name), lines=drawn.make_lines({name: ""}), is_smoothed=True))
    for rest, labels in evaluations.items():
        shown = labels if len(labels) > 1 else dict.fromkeys(labels, "")
        found.append(Panel("Evaluation", rest.replace("_", " ").capitalize(), lines=drawn.make_lines(shown)))
    found = [panel for panel in found if any(line.series.count > 1 for line in panel.lines)]
    for section in {panel.section for panel in found}:
        narrow = [panel for panel in found if panel.section == section and not panel.is_wide]
        if len(narrow) % 2:
            narrow[-1].is_wide = True  # otherwise it would leave a gap in the grid
    return found


def split_role(name: str) -> tuple[str, str]:
    """Split the name of a value into the kind of evaluation and the name of the metric.

    "val/loss" becomes ("validation", "loss"). The kind is "" for values from training.
    """
    if found := _EVALUATED.match(name):
        return {"eval": "evaluation", "val": "validation", "test": "test"}[found[1]], name[found.end() :]
    return "", _TRAINED.sub("", name, count=1)


def select_single_values(
    runs: Sequence[RunData], drawn: Sequence[Panel]
) -> dict[str, list[tuple[float, float] | None]]:
    """Return the values that were logged once per run and have no chart.

    Args:
        runs: Runs of the report.
        drawn: Charts of the report.

    Returns:
        By name, a list with one entry per run: the pair of (step, value), or None if the run has no such value.
    """
    taken = {line.name for panel in drawn for line in panel.lines} | {"epoch"}
    names = dict.fromkeys(name for run in runs for name in run.series if name not in taken)
    return {
        name: [(run.series[name][0][0], run.series[name][0][2]) if name in run.series else None for run in runs]
        for name in names
    }


def _make_memory_panels(drawn: "_Drawing", names: Sequence[str]) -> Iterator[Panel]:
    """Yield the memory charts. For a single run, one chart shows the memory of all phases of a training step.

    With several runs, each phase has its own chart with one color per run.

    Args:
        drawn: Builder of the chart lines.
        names: Names of all logged values.
    """
    phases = [name.partition("/")[2] for name in names if name.startswith("memory/")]
    ordered = sorted(phases, key=lambda phase: (_PHASES.index(phase) if phase in _PHASES else len(_PHASES), phase))
    # The peak is last, so that it is drawn over the phase in which it was reached.
    known = {"memory": "in use", **{f"memory/{phase}": phase for phase in ordered}, "memory_peak": "peak"}
    there = set(names)
    present = {name: label for name, label in known.items() if name in there}
    if len(drawn.runs) == 1:
        if present:
            title = "Memory by phase" if ordered else "Memory"
            yield Panel(
                "Memory",
                title,
                "bytes",
                True,
                is_wide=bool(ordered),
                is_tall=bool(ordered),
                lines=drawn.make_lines(present),
            )
        return
    for name, label in present.items():
        title = f"Memory, {label}" if name in _MEMORY else f"Memory in {label}"
        yield Panel("Memory", title, "bytes", True, lines=drawn.make_lines({name: ""}))


class _Drawing:
    """Builder of chart lines from logged series.

    It assigns one color per run, or one per line if there is a single run.

    Args:
        runs: Runs of the report.
        limit: Maximum number of buckets per series.
    """

    def __init__(self, runs: Sequence[RunData], limit: int) -> None:
        self.runs = runs
        self._limit = limit

    def make_lines(self, names: dict[str, str]) -> list[ChartLine]:
        found = []
        for index, run in enumerate(self.runs):
            for place, (name, label) in enumerate((name, label) for name, label in names.items() if name in run.series):
                series = downsample(run.series[name], self._limit)
                color = index if len(self.runs) > 1 else place
                is_dotted = bool(split_role(name)[0]) or series.count == 1
                is_dotted = is_dotted and len(series.means) <= 120
                is_dashed = name == "memory_peak" and len(self.runs) == 1
                found.append(ChartLine(index, name, label, color, is_dotted, is_dashed, series))
        return found


def _guess_unit(name: str) -> str:
    if name.endswith("_per_second"):
        return "rate"
    return "bytes" if name.endswith("_bytes") else "number"


def find_step_range(panels: Sequence[Panel]) -> tuple[float, float]:
    """Return the range of the step axis, which is the same for all charts: the smallest and the largest step.

    The range begins at 0 if the smallest step is close to 0. It is never empty: (0.0, 1.0) if there are no values, and
    widened by half a step on both sides if there is a single step.
    """
    steps = [end for panel in panels for line in panel.lines for end in (line.series.steps[0], line.series.steps[-1])]
    low, high = min(steps, default=0.0), max(steps, default=1.0)
    if 0 < low < 0.05 * high:
        low = 0.0
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def find_value_range(panel: Panel) -> tuple[float, float]:
    """Return the lower and the upper end of a chart's value axis: (0.0, 1.0) if the chart has no finite values.

    The ends include a small margin. Spikes that would flatten the other values are cut off.
    """
    tops = [value for line in panel.lines for value in (line.series.highs or line.series.means) if value is not None]
    lows = [value for line in panel.lines for value in (line.series.lows or line.series.means) if value is not None]
    if not tops:
        return 0.0, 1.0
    lowest, highest = find_spike_limits(lows, tops)
    # The edge is the most extreme value kept, not the limit itself.
    high = max(value for value in tops if value <= highest)
    low = min(value for value in lows if value >= lowest)
    return _widen_range(low, high, panel.from_zero)


def find_spike_limits(lows: Sequence[float | None], highs: Sequence[float | None]) -> tuple[float, float]:
    """Return the limits outside of which values are treated as spikes.

    The limits are the 10% and 90% quantiles, widened on each side by six times their distance. With fewer than 20
    values there are no limits.

    Args:
        lows: Minimum of each bucket; None for a bucket without finite values.
        highs: Maximum of each bucket; None for a bucket without finite values.
    """
    bottom, top = (sorted(value for value in values if value is not None) for values in (lows, highs))
    if len(bottom) < 20:
        return -math.inf, math.inf
    first, last = _find_quantile(bottom, 0.1), _find_quantile(top, 0.9)
    spread = max(last - first, 1e-12 * max(abs(first), abs(last)))
    return first - 6 * spread, last + 6 * spread


def _find_quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[round(share * (len(ordered) - 1))]


def _widen_range(low: float, high: float, from_zero: bool) -> tuple[float, float]:
    """Return the range of an axis, extended by a small margin below and above.

    The result is neither so narrow nor so wide that calculations with floats fail.

    Args:
        low: Lowest value.
        high: Highest value.
        from_zero: Whether the axis starts at zero if no value is negative.
    """
    low, high = max(low, -1e300), min(high, 1e300)
    if from_zero and low >= 0:
        low = 0.0
    size = max(abs(low), abs(high))
    if high - low <= max(1e-9 * size, 1e-300):
        room = 0.1 * size or 1.0
        return (low if from_zero and low == 0 else low - room), high + room
    room = 0.06 * (high - low)
    return (low if low == 0 else low - room), high + room
