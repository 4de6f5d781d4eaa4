"""Charts of a report: group the logged series into charts with sections, colors and units."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from headway.core.tracking.report.data import RunData
from headway.core.tracking.report.series import DownsampledSeries, downsample

MAX_BUCKETS = 1200
"""Maximum number of buckets of one series. Fewer are used if there are many series."""
ALL_BUCKETS = 60_000
"""Maximum number of buckets of all series together, which limits the page to a few megabytes."""
MIN_BUCKETS = 200
"""Minimum number of buckets of one series, even if there are many series."""
SMOOTHING = 0.05
"""Default width of the smoothing window, as a fraction of the series. A slider on the page changes it."""
_EVALUATION_PREFIX = re.compile(r"(eval|val|test)(?:uation|id|idation)?[_/](?=.)")
"""Pattern of the prefix of names from an evaluation, such as "eval_" or "validation/"."""
_TRAINING_PREFIX = re.compile(r"train(?:ing)?/(?=.)")
"""Pattern of the prefix of names from training. "train_" is none, because it is part of names such as "train_loss"."""
_MEMORY = ("memory", "memory_peak")
"""Names of the series with the memory of the whole process. Series with the memory of a phase begin with "memory/"."""
_PHASES = ("forward", "backward", "optimizer", "evaluation")
"""Phases of a training step, in the order in which a memory chart lists them."""


@dataclass(frozen=True)
class ChartLine:
    """One series on a chart.

    Attributes:
        run: Index of the run that logged the series.
        name: Name of the value in the log.
        label: Name on the chart.
        color: Index of the line's color. `line_styles.choose_color` turns it into an index of
            `line_styles.LINE_COLORS`.
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
        starts_at_zero: Whether the value axis starts at zero.
        is_wide: Whether the chart has the full width of the page.
        is_smoothed: Whether a smoothed line is drawn over the values, because they are noisy.
        is_tall: Whether the chart is taller than the others.
        lines: Lines of the chart.
    """

    section: str
    title: str
    unit: str = "number"
    starts_at_zero: bool = False
    is_wide: bool = False
    is_smoothed: bool = False
    is_tall: bool = False
    lines: list[ChartLine] = field(default_factory=list)


_KNOWN_PANELS = (
    (Panel("Training", "Loss", is_smoothed=True, is_tall=True, is_wide=True), ("loss", "train_loss")),
    (Panel("Training", "Learning rate", starts_at_zero=True), ("learning_rate", "lr")),
    (Panel("Training", "Gradient norm", is_smoothed=True, starts_at_zero=True), ("grad_norm", "gradient_norm", "norm")),
    (Panel("Speed", "Samples per second", "rate", starts_at_zero=True, is_smoothed=True), ("samples_per_second",)),
    (Panel("Speed", "Steps per second", "rate", starts_at_zero=True, is_smoothed=True), ("steps_per_second",)),
    (Panel("Speed", "Tokens per second", "rate", starts_at_zero=True, is_smoothed=True), ("tokens_per_second",)),
    (Panel("Speed", "Model FLOPs utilization", "share", starts_at_zero=True, is_smoothed=True), ("mfu",)),
    (Panel("Speed", "Time spent waiting for data", "share", starts_at_zero=True, is_smoothed=True), ("data_wait",)),
)
"""Charts for well-known series, with the names of these series. Evaluation losses are drawn on the loss chart."""

_WITHOUT_CHART = frozenset({"epoch", "samples_seen", "tokens_seen", "padding_tokens_seen", "num_input_tokens_seen"})
"""Names of series that only count how far a run has come. Their charts would be straight lines."""

WAIT_BY_RANK = "data_wait/rank_"
"""Name prefix, before the rank's number, of the series with the fraction of time that a rank waited for data."""


def build_panels(runs: Sequence[RunData], max_buckets: int = MAX_BUCKETS) -> list[Panel]:
    """Return the charts of a report. A chart on which each series has a single value is left out.

    `select_single_values` returns these values.

    Args:
        runs: Runs of the report.
        max_buckets: Maximum number of buckets per series. Fewer are used if there are many series, but at least
            `MIN_BUCKETS`. Default: `MAX_BUCKETS`.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.series))
    num_series = sum(len(run.series) for run in runs)
    line_builder = _LineBuilder(runs, max(MIN_BUCKETS, min(max_buckets, ALL_BUCKETS // max(1, num_series))))
    roles = {name: split_role(name) for name in names}
    panels = _make_known_panels(line_builder, roles)
    names_on_panels = {line.name for panel in panels for line in panel.lines} | _WITHOUT_CHART
    waits = {name: name.removeprefix(WAIT_BY_RANK) for name in names if name.startswith(WAIT_BY_RANK)}
    title = "Time spent waiting for data, by rank"
    panels.append(
        Panel("Speed", title, "share", starts_at_zero=True, is_smoothed=True, lines=line_builder.make_lines(waits))
    )
    names_on_panels |= set(waits)
    panels += _make_memory_panels(line_builder, names)
    other_roles = {
        name: role
        for name, role in roles.items()
        if name not in names_on_panels and name not in _MEMORY and not name.startswith("memory/")
    }
    panels += _make_other_panels(line_builder, other_roles)
    panels = [panel for panel in panels if any(line.series.count > 1 for line in panel.lines)]
    for section in {panel.section for panel in panels}:
        narrow = [panel for panel in panels if panel.section == section and not panel.is_wide]
        if len(narrow) % 2:
            narrow[-1].is_wide = True  # otherwise it would leave a gap in the grid
    return panels


def _make_other_panels(line_builder: "_LineBuilder", roles: Mapping[str, tuple[str, str]]) -> list[Panel]:
    """Return the charts for series without a chart of their own: one for each value, and one for each evaluated metric.

    Args:
        line_builder: Builder of the charts' lines.
        roles: Pair of (kind of evaluation or "", metric) by name of the series (see `split_role`).
    """
    panels = []
    kinds_by_metric: dict[str, dict[str, str]] = {}  # kinds of evaluation by name of the series, by metric
    for name, (kind, metric) in roles.items():
        if kind:
            kinds_by_metric.setdefault(metric, {})[name] = kind
            continue
        section = "Training" if name.endswith("loss") else "More"
        lines = line_builder.make_lines({name: ""})
        panels.append(Panel(section, name, _guess_unit(name), lines=lines, is_smoothed=True))
    for metric, kinds in kinds_by_metric.items():
        # The label of a single line would only repeat the title.
        labels = kinds if len(kinds) > 1 else dict.fromkeys(kinds, "")
        title = metric.replace("_", " ").capitalize()
        panels.append(Panel("Evaluation", title, lines=line_builder.make_lines(labels)))
    return panels


def _make_known_panels(line_builder: "_LineBuilder", roles: Mapping[str, tuple[str, str]]) -> list[Panel]:
    """Return the charts for well-known series. They have no lines if no run has logged these series.

    Args:
        line_builder: Builder of the chart lines.
        roles: Result of `split_role` for each logged value, by its name.
    """
    panels = []
    for panel, known_names in _KNOWN_PANELS:
        is_loss = panel.title == "Loss"
        label = "training" if is_loss else ""
        labels = {name: label for name, (kind, metric) in roles.items() if not kind and metric in known_names}
        if is_loss:
            labels |= {name: kind for name, (kind, metric) in roles.items() if kind and metric == "loss"}
        panels.append(replace(panel, lines=line_builder.make_lines(labels)))
    return panels


def split_role(name: str) -> tuple[str, str]:
    """Split the name of a value into the kind of evaluation and the name of the metric.

    "val/loss" becomes ("validation", "loss"). The kind is "" for values from training.
    """
    if match := _EVALUATION_PREFIX.match(name):
        return {"eval": "evaluation", "val": "validation", "test": "test"}[match[1]], name[match.end() :]
    return "", _TRAINING_PREFIX.sub("", name, count=1)


def select_single_values(
    runs: Sequence[RunData], panels: Sequence[Panel]
) -> dict[str, list[tuple[float, float] | None]]:
    """Return the values that were logged once per run and have no chart.

    Args:
        runs: Runs of the report.
        panels: Charts of the report.

    Returns:
        By name, a list with one entry per run: the pair of (step, value), or None if the run has no such value.
    """
    names_on_panels = {line.name for panel in panels for line in panel.lines} | _WITHOUT_CHART
    names = dict.fromkeys(name for run in runs for name in run.series if name not in names_on_panels)
    return {name: [_get_first_value(run, name) for run in runs] for name in names}


def _get_first_value(run: RunData, name: str) -> tuple[float, float] | None:
    """Return the (step, value) of a run's first point with a name; None if there is none."""
    if name not in run.series:
        return None
    step, _, value = run.series[name][0]
    return step, value


def _make_memory_panels(line_builder: "_LineBuilder", names: Sequence[str]) -> Iterator[Panel]:
    """Yield the memory charts. For a single run, one chart shows the memory of all phases of a training step.

    With several runs, each phase has its own chart with one color per run.

    Args:
        line_builder: Builder of the chart lines.
        names: Names of all logged values.
    """
    phases = [name.partition("/")[2] for name in names if name.startswith("memory/")]
    ordered = sorted(phases, key=lambda phase: (_PHASES.index(phase) if phase in _PHASES else len(_PHASES), phase))
    # The peak is last, so that it is drawn over the phase in which it was reached.
    all_labels = {"memory": "in use", **{f"memory/{phase}": phase for phase in ordered}, "memory_peak": "peak"}
    logged_names = set(names)  # there can be very many
    labels = {name: label for name, label in all_labels.items() if name in logged_names}
    if len(line_builder.runs) == 1:
        if labels:
            title = "Memory by phase" if ordered else "Memory"
            yield Panel(
                "Memory",
                title,
                "bytes",
                starts_at_zero=True,
                is_wide=bool(ordered),
                is_tall=bool(ordered),
                lines=line_builder.make_lines(labels),
            )
        return
    for name, label in labels.items():
        title = f"Memory, {label}" if name in _MEMORY else f"Memory in {label}"
        yield Panel("Memory", title, "bytes", starts_at_zero=True, lines=line_builder.make_lines({name: ""}))


class _LineBuilder:
    """Builder of chart lines from logged series.

    It assigns one color per run, or one per line if there is a single run.

    Args:
        runs: Runs of the report.
        limit: Maximum number of buckets per series.
    """

    def __init__(self, runs: Sequence[RunData], limit: int) -> None:
        self.runs = runs
        self._limit = limit

    def make_lines(self, labels: dict[str, str]) -> list[ChartLine]:
        """Return the lines of one chart, one per run and logged value.

        Args:
            labels: Labels of the lines, by name of the value.
        """
        has_one_run = len(self.runs) == 1
        lines = []
        for run_index, run in enumerate(self.runs):
            logged_labels = {name: label for name, label in labels.items() if name in run.series}
            for line_index, (name, label) in enumerate(logged_labels.items()):
                series = downsample(run.series[name], self._limit)
                is_evaluation = bool(split_role(name)[0])
                line = ChartLine(
                    run=run_index,
                    name=name,
                    label=label,
                    color=line_index if has_one_run else run_index,
                    is_dotted=(is_evaluation or series.count == 1) and len(series.means) <= 120,
                    is_dashed=name == "memory_peak" and has_one_run,
                    series=series,
                )
                lines.append(line)
        return lines


def _guess_unit(name: str) -> str:
    """Return the unit of a logged value, from the end of its name."""
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
    highs = [value for line in panel.lines for value in (line.series.highs or line.series.means) if value is not None]
    lows = [value for line in panel.lines for value in (line.series.lows or line.series.means) if value is not None]
    if not highs:
        return 0.0, 1.0
    low_limit, high_limit = find_spike_limits(lows, highs)
    # The edge is the most extreme value within the limits, not the limit itself.
    high = max(value for value in highs if value <= high_limit)
    low = min(value for value in lows if value >= low_limit)
    return _widen_range(low, high, panel.starts_at_zero)


def find_spike_limits(lows: Sequence[float | None], highs: Sequence[float | None]) -> tuple[float, float]:
    """Return the limits outside of which values are treated as spikes.

    The limits are the 10% and 90% quantiles, widened on each side by six times their distance. With fewer than 20
    values there are no limits.

    Args:
        lows: Minimum of each bucket; None for a bucket without finite values.
        highs: Maximum of each bucket; None for a bucket without finite values.
    """
    sorted_lows = sorted(value for value in lows if value is not None)
    sorted_highs = sorted(value for value in highs if value is not None)
    if len(sorted_lows) < 20:
        return -math.inf, math.inf
    low, high = _find_quantile(sorted_lows, 0.1), _find_quantile(sorted_highs, 0.9)
    # The second term keeps rounding errors of a constant series within the limits.
    spread = max(high - low, 1e-12 * max(abs(low), abs(high)))
    return low - 6 * spread, high + 6 * spread


def _find_quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which a fraction `share` (0 to 1) of the sorted values is."""
    return ordered[round(share * (len(ordered) - 1))]


def _widen_range(low: float, high: float, starts_at_zero: bool) -> tuple[float, float]:
    """Return the range of an axis, extended by a small margin below and above.

    The result is neither so narrow nor so wide that calculations with floats fail.

    Args:
        low: Lowest value.
        high: Highest value.
        starts_at_zero: Whether the axis starts at zero if no value is negative.
    """
    low, high = max(low, -1e300), min(high, 1e300)
    if starts_at_zero and low >= 0:
        low = 0.0
    size = max(abs(low), abs(high))
    if high - low <= max(1e-9 * size, 1e-300):
        margin = 0.1 * size or 1.0
        return (low if starts_at_zero and low == 0 else low - margin), high + margin
    margin = 0.06 * (high - low)
    return (low if low == 0 else low - margin), high + margin
