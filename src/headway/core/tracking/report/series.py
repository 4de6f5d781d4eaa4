"""Series of a report's charts: downsampling to buckets that keep all extremes, and marks for values that are not finite.

A chart is a few hundred pixels wide. Of a million values, each column of pixels can show only the lowest value, the
highest value and where most values are. So a bucket keeps minimum, maximum and mean. The area between minimum and maximum
covers exactly the pixels that a line through all values would cover. This is the argument of Jugel, Jerzak,
Hackenbroich and Markl, "M4: A Visualization-Oriented Time Series Data Aggregation", VLDB 2014. Their method, M4, draws
a line through the first, last, lowest and highest point of each column.

A smoothed line can be computed from means without bias. Points chosen by shape, such as those of LTTB (Steinarsson,
2013), do not allow this and can omit extremes. Unlike M4's, these buckets contain equal numbers of values rather
than equal spans, because they are drawn over two axes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from headway.core.tracking.report.data import PlacedPoint

MAX_MARKS = 150
"""Maximum number of marks for non-finite values in one series. If there are more, neighboring marks are merged."""


@dataclass(frozen=True, slots=True)
class NonFiniteMark:
    """Mark on a chart for consecutive values that are not finite.

    Attributes:
        kind: "nan", "inf" or "-inf"; "mixed" if neighboring marks of several kinds were merged.
        steps: First and last step.
        times: First and last time, in seconds since the start of the run.
        count: Number of values.
    """

    kind: str
    steps: tuple[float, float]
    times: tuple[float, float]
    count: int


@dataclass(frozen=True, slots=True)
class DownsampledSeries:
    """Series that is reduced to a limited number of buckets, for drawing.

    Attributes:
        steps: Step of each bucket.
        times: Time of each bucket, in seconds since the start of the run.
        means: Mean of each bucket. None if the bucket contains no finite value; the line has a gap there.
        lows: Minimum of each bucket; empty if each bucket contains a single value.
        highs: Maximum of each bucket; empty if each bucket contains a single value.
        count: Number of values in the series, including those that are not finite.
        marks: Marks for values that are not finite.
    """

    steps: list[float]
    times: list[float]
    means: list[float | None]
    lows: list[float | None] = field(default_factory=list)
    highs: list[float | None] = field(default_factory=list)
    count: int = 0
    marks: list[NonFiniteMark] = field(default_factory=list)

    def find_bounds(self) -> tuple[float, float] | None:
        """Return the lowest and the highest finite value, or None if no value is finite."""
        lows = [value for value in (self.lows or self.means) if value is not None]
        highs = [value for value in (self.highs or self.means) if value is not None]
        return (min(lows), max(highs)) if lows else None


def downsample(points: Sequence[PlacedPoint], limit: int) -> DownsampledSeries:
    """Reduce a series to at most `limit` buckets with equal numbers of values.

    The first bucket is drawn at the first point and the last bucket at the last point, so that the line spans the full
    run. If the series has at most `limit` points, each bucket contains a single value.

    Args:
        points: Points in the order of their steps.
        limit: Maximum number of buckets, at least 2.
    """
    count = len(points)
    steps, times, values = zip(*points, strict=True) if points else ((), (), ())
    marks = [] if all(map(math.isfinite, values)) else _find_marks(points)
    if count <= limit:
        means = [value if math.isfinite(value) else None for value in values]
        return DownsampledSeries(list(steps), list(times), means, count=count, marks=marks)
    series = DownsampledSeries([], [], [], count=count, marks=marks)
    for bucket, (start, end) in enumerate(_split_evenly(count, limit)):
        if bucket == 0:
            drawn_at = start
        elif bucket == limit - 1:
            drawn_at = end - 1
        else:
            drawn_at = (start + end) // 2
        # Without marks, all values are finite.
        finite = [value for value in values[start:end] if math.isfinite(value)] if marks else values[start:end]
        series.steps.append(steps[drawn_at])
        series.times.append(times[drawn_at])
        series.means.append(_compute_average(finite))
        series.lows.append(min(finite, default=None))
        series.highs.append(max(finite, default=None))
    return series


def _split_evenly(count: int, num_parts: int) -> Iterator[tuple[int, int]]:
    """Return an iterator over the (start, end) indices of `num_parts` consecutive parts of nearly equal size."""
    return ((part * count // num_parts, (part + 1) * count // num_parts) for part in range(num_parts))


def _compute_average(values: Sequence[float]) -> float | None:
    """Return the mean of finite values, or None if there are none."""
    if not values:
        return None
    total = sum(values)
    # Values near the largest float: their sum would be inf.
    return total / len(values) if math.isfinite(total) else sum(value / len(values) for value in values)


def _find_marks(points: Sequence[PlacedPoint]) -> list[NonFiniteMark]:
    """Return a mark for each sequence of consecutive non-finite values of one kind.

    Neighboring marks are merged if there are more than `MAX_MARKS`.
    """
    marks: list[NonFiniteMark] = []
    previous = -2  # index of the latest non-finite value
    for index, (step, seconds, value) in enumerate(points):
        if math.isfinite(value):
            continue
        kind = _name_non_finite(value)
        if index == previous + 1 and marks[-1].kind == kind:
            last = marks.pop()
            marks.append(NonFiniteMark(kind, (last.steps[0], step), (last.times[0], seconds), last.count + 1))
        else:
            marks.append(NonFiniteMark(kind, (step, step), (seconds, seconds), 1))
        previous = index
    if len(marks) <= MAX_MARKS:
        return marks
    return [_merge_marks(marks[start:end]) for start, end in _split_evenly(len(marks), MAX_MARKS)]


def _name_non_finite(value: float) -> str:
    """Return "nan", "inf" or "-inf" for such a value."""
    if math.isnan(value):
        return "nan"
    return "inf" if value > 0 else "-inf"


def _merge_marks(marks: Sequence[NonFiniteMark]) -> NonFiniteMark:
    """Return one mark that spans consecutive marks. Its kind is "mixed" if their kinds differ."""
    kinds = {mark.kind for mark in marks}
    first, last = marks[0], marks[-1]
    return NonFiniteMark(
        kinds.pop() if len(kinds) == 1 else "mixed",
        (first.steps[0], last.steps[1]),
        (first.times[0], last.times[1]),
        sum(mark.count for mark in marks),
    )
