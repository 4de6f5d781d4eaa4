"""Makes long series short enough to draw: buckets that keep every extreme, marks for nan and inf.

A chart is some hundred pixels wide. Of a million values it can show, in each column of pixels, the lowest, the highest and
where the bulk lies; so a bucket keeps just these: minimum, maximum and mean. The envelope covers the very pixels that the
polyline of all the values would (the argument of Jugel, Jerzak, Hackenbroich and Markl, "M4: A Visualization-Oriented Time
Series Data Aggregation", VLDB 2014, which draws a line by the first, last, lowest and highest point of each column). The
mean is what a smoothed line may be made from without bias; points chosen by shape, such as those of LTTB (Steinarsson,
2013), may not, and can leave extremes out. Unlike M4's, our buckets hold equally many values rather than equal spans, since
they are drawn over two axes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Point = tuple[float, float, float]
"""Step, seconds since the run began, value."""

MAX_MARKS = 150
"""Marks of one series; more are drawn together."""


@dataclass(frozen=True, slots=True)
class NonFiniteMark:
    """A stretch of values that are not finite numbers.

    Attributes:
        kind: "nan", "inf" or "-inf"; "mixed" where stretches of several kinds were drawn together.
        steps: the first and the last step.
        times: the same in seconds.
        count: how many values.
    """

    kind: str
    steps: tuple[float, float]
    times: tuple[float, float]
    count: int


@dataclass(frozen=True, slots=True)
class DownsampledSeries:
    """A series as it is drawn.

    Attributes:
        steps: the step of each bucket.
        times: the same in seconds.
        means: the mean of each bucket; None where it holds no finite value, which is a gap in the line.
        lows: the minimum of each bucket. Empty where each bucket is one value.
        highs: the maximum.
        count: how many values the series has, those that are not finite included.
        marks: what is not finite.
    """

    steps: list[float]
    times: list[float]
    means: list[float | None]
    lows: list[float | None] = field(default_factory=list)
    highs: list[float | None] = field(default_factory=list)
    count: int = 0
    marks: list[NonFiniteMark] = field(default_factory=list)

    def bounds(self) -> tuple[float, float] | None:
        """The lowest and the highest finite value; None where there is none."""
        low = [value for value in (self.lows or self.means) if value is not None]
        high = [value for value in (self.highs or self.means) if value is not None]
        return (min(low), max(high)) if low else None


def downsample(points: Sequence[Point], limit: int) -> DownsampledSeries:
    """Put the values into at most `limit` buckets of equal count.

    The first and the last bucket stand where the first and the last point do, so that a line is as long as its run.

    Args:
        points: in the order of their steps.
        limit: at least 2.
    """
    count = len(points)
    steps, times, values = zip(*points, strict=True) if points else ((), (), ())
    marks = [] if all(map(math.isfinite, values)) else _find_marks(points)
    if count <= limit:
        means = [value if math.isfinite(value) else None for value in values]
        return DownsampledSeries(list(steps), list(times), means, count=count, marks=marks)
    found = DownsampledSeries([], [], [], count=count, marks=marks)
    for index, (start, end) in enumerate(_split_evenly(count, limit)):
        place = {0: start, limit - 1: end - 1}.get(index, (start + end) // 2)
        finite = [value for value in values[start:end] if math.isfinite(value)] if marks else values[start:end]
        found.steps.append(steps[place])
        found.times.append(times[place])
        found.means.append(_average(finite))
        found.lows.append(min(finite, default=None))
        found.highs.append(max(finite, default=None))
    return found


def _split_evenly(count: int, limit: int) -> Iterator[tuple[int, int]]:
    return ((index * count // limit, (index + 1) * count // limit) for index in range(limit))


def _average(values: Sequence[float]) -> float | None:
    if not values:
        return None
    total = sum(values)
    # Values near the end of the range of floats: their sum would be inf.
    return total / len(values) if math.isfinite(total) else sum(value / len(values) for value in values)


def _find_marks(points: Sequence[Point]) -> list[NonFiniteMark]:
    """Stretches of neighbours that are not finite, and of one kind."""
    found: list[NonFiniteMark] = []
    previous = -2
    for index, (step, seconds, value) in enumerate(points):
        if math.isfinite(value):
            continue
        kind = "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
        if index == previous + 1 and found[-1].kind == kind:
            last = found.pop()
            found.append(NonFiniteMark(kind, (last.steps[0], step), (last.times[0], seconds), last.count + 1))
        else:
            found.append(NonFiniteMark(kind, (step, step), (seconds, seconds), 1))
        previous = index
    if len(found) <= MAX_MARKS:
        return found
    return [_merge_marks(found[start:end]) for start, end in _split_evenly(len(found), MAX_MARKS)]


def _merge_marks(marks: Sequence[NonFiniteMark]) -> NonFiniteMark:
    kinds = {mark.kind for mark in marks}
    first, last = marks[0], marks[-1]
    return NonFiniteMark(
        kinds.pop() if len(kinds) == 1 else "mixed",
        (first.steps[0], last.steps[1]),
        (first.times[0], last.times[1]),
        sum(mark.count for mark in marks),
    )
