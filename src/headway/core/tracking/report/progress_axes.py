"""Horizontal axes of a report that show how many tokens or samples a run had seen.

Runs with different batch sizes are compared fairly by tokens or samples, not by steps. The axes need counts that the
script or the Trainer has logged, for example `accelerator.log({"loss": loss, **throughput.seen()})`.
"""

import math
from collections.abc import Sequence

from headway.core.tracking.report.data import PlacedPoint, RunData
from headway.core.tracking.report.panels import MAX_BUCKETS, split_role

Counts = list[tuple[float, float]]
"""Pairs of (step, count) of one run. Both increase from pair to pair."""

_NAMES_OF_COUNTS = {
    "tokens": ("tokens_seen", "num_input_tokens_seen"),
    "samples": ("samples_seen",),
}
"""Names of the logged counts, by name of the axis. The Trainer logs `num_input_tokens_seen`."""


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
