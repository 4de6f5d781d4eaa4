"""Horizontal axes of a report that show how many tokens or samples a run had seen.

Runs with different batch sizes are compared fairly by tokens or samples, not by steps. The axes need counts that the
script or the Trainer has logged, for example `accelerator.log({"loss": loss, **throughput.seen()})`.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from headway.core.tracking.report.data import PlacedPoint, RunData
from headway.core.tracking.report.panels import MAX_BUCKETS, ChartLine, Panel, split_role
from headway.errors import ConfigError

Counts = list[tuple[float, float]]
"""Pairs of (step, count) of one run. Both increase from pair to pair."""

_NAMES_OF_COUNTS = {
    "tokens": ("tokens_seen", "num_input_tokens_seen"),
    "samples": ("samples_seen",),
}
"""Names of the logged counts, by name of the axis. The Trainer logs `num_input_tokens_seen`."""
PROGRESS_AXES = tuple(_NAMES_OF_COUNTS)
"""Names of the horizontal axes besides steps and time."""


def find_progress_axes(runs: Sequence[RunData]) -> dict[str, list[Counts]]:
    """Return the axes for which every run has logged counts.

    Args:
        runs: Runs of the report.

    Returns:
        By name of the axis, "tokens" or "samples", the counts of each run. Empty if a run has no steps.
    """
    if not all(run.has_steps for run in runs):
        return {}
    axes = {name: [_read_counts(run, logged_names) for run in runs] for name, logged_names in _NAMES_OF_COUNTS.items()}
    return {name: counts for name, counts in axes.items() if all(counts)}


def require_counts(runs: Sequence[RunData], axis: str) -> list[Counts]:
    """Return the counts of each run for an axis.

    Args:
        runs: Runs of the report.
        axis: Name of the axis, "tokens" or "samples".

    Raises:
        ConfigError: If some run has not logged the counts at two steps.
    """
    logged_names = _NAMES_OF_COUNTS[axis]
    counts = [_read_counts(run, logged_names) if run.has_steps else [] for run in runs]
    if missing := [run.label for run, own in zip(runs, counts, strict=True) if not own]:
        usable = [name for name in PROGRESS_AXES if name in find_progress_axes(runs)]
        raise ConfigError(
            f"the axis {axis!r} needs {' or '.join(logged_names)} at two steps or more in each run, which {', '.join(missing)} did "
            f"not log; allowed for these runs: {', '.join(['step', *usable])}. To log the counts, call "
            "accelerator.log({'loss': loss, **throughput.seen()})"
        )
    return counts


def interpolate_count(counts: Counts, step: float) -> float:
    """Return the count that a run had reached at a step.

    Between the logged steps, it is interpolated linearly. Outside of them, it continues at the pace of the nearest two.
    `countAt` in script.js computes the same numbers.
    """
    high = min(max(bisect_right(counts, (step, math.inf)), 1), len(counts) - 1)
    (low_step, low_count), (high_step, high_count) = counts[high - 1], counts[high]
    return low_count + (step - low_step) / (high_step - low_step) * (high_count - low_count)


def replace_steps(panels: Sequence[Panel], counts: Sequence[Counts]) -> list[Panel]:
    """Return charts whose lines are placed by counts of tokens or samples, not by steps.

    Args:
        panels: Charts of the report.
        counts: Counts of each run, from `require_counts`.
    """

    def move_line(line: ChartLine) -> ChartLine:
        own = counts[line.run]
        steps = [interpolate_count(own, step) for step in line.series.steps]
        marks = [
            replace(mark, steps=(interpolate_count(own, mark.steps[0]), interpolate_count(own, mark.steps[1])))
            for mark in line.series.marks
        ]
        return replace(line, series=replace(line.series, steps=steps, marks=marks))

    return [replace(panel, lines=[move_line(line) for line in panel.lines]) for panel in panels]


def _read_counts(run: RunData, logged_names: Sequence[str]) -> Counts:
    """Return a run's counts at up to `MAX_BUCKETS` steps, beginning with no count at step 0.

    The result is empty if there are fewer than two steps with different counts. Points at which the count does not
    increase are left out, such as those of a run that started again in the same folder.

    Args:
        run: Run of the report.
        logged_names: Names of the count in the log. A prefix for training, as in "train/tokens_seen", is allowed.
    """
    points: Sequence[PlacedPoint] = ()
    for name, series in run.series.items():
        evaluation, count_name = split_role(name)
        if not evaluation and count_name in logged_names:
            points = series
            break
    counts: Counts = [(0.0, 0.0)] if points and points[0][0] > 0 else []
    for step, _, count in points:
        if math.isfinite(count) and (not counts or (step > counts[-1][0] and count > counts[-1][1])):
            counts.append((step, count))
    if len(counts) < 2:
        return []
    stride = math.ceil(len(counts) / MAX_BUCKETS)
    return [*counts[:-1:stride], counts[-1]]
