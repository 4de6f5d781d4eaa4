"""Finds and loads the runs of a report: series placed on a step and a time, made short enough to draw, events, facts.

Makes long series short enough to draw: buckets that keep every extreme, marks for nan and inf.

A chart is some hundred pixels wide. Of a million values it can show, in each column of pixels, the lowest, the highest and
where the bulk lies; so a bucket keeps just these: minimum, maximum and mean. The envelope covers the very pixels that the
polyline of all the values would (the argument of Jugel, Jerzak, Hackenbroich and Markl, "M4: A Visualization-Oriented Time
Series Data Aggregation", VLDB 2014, which draws a line by the first, last, lowest and highest point of each column). The
mean is what a smoothed line may be made from without bias; points chosen by shape, such as those of LTTB (Steinarsson,
2013), may not, and can leave extremes out. Unlike M4's, our buckets hold equally many values rather than equal spans, since
they are drawn over two axes.
"""

import math
import os
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from headway.common.garbage import no_garbage_search
from headway.common.object_path import ObjectPath, to_path
from headway.common.text import listed
from headway.errors import ConfigError
from headway.tracking.mirror import fetch_log
from headway.tracking.runlog import FILE, LoggedRun, ProcessStart, leaves, read_run

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


_MAX_STEP = 2**53
"""Beyond it floats, and so the page's script, cannot tell steps apart."""
_FEWEST_SPEEDS = 10


@dataclass(frozen=True)
class PlacedEvent:
    """Something that happened.

    Attributes:
        kind: "out_of_memory", "checkpoint" ...
        step: its place on the axis of steps.
        seconds: since the run began.
        details: what the run wrote with it.
        has_step: False where the run gave no step, and the time decided.
    """

    kind: str
    step: float
    seconds: float
    details: Mapping[str, Any]
    has_step: bool = True


@dataclass
class RunData:
    """A run as the report needs it.

    Attributes:
        label: its name on the page, different from the other runs'.
        path: the log.
        project: as the run named itself.
        config: flat, "optimizer.lr" for a nested one.
        starts: what each start of the process wrote: world size, device, versions.
        began: unix time of the first line.
        seconds: from the first line to the last.
        is_finished: it wrote its end.
        is_torn: its last line is not whole: it was killed while writing it.
        damaged: numbers of the lines that could not be read.
        series: points by name, in the order of their steps.
        texts: the last value by name where it is not a number.
        events: in the order of time.
        summary: what the run wrote at its end.
        has_steps: False where no value has a step; steps are then seconds.
        silent_for: seconds between its last line and the making of this report.
    """

    label: str
    path: Path
    project: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    starts: list[ProcessStart] = field(default_factory=list)
    began: float = 0.0
    seconds: float = 0.0
    is_finished: bool = False
    is_torn: bool = False
    damaged: list[int] = field(default_factory=list)
    series: dict[str, list[Point]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    events: list[PlacedEvent] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    has_steps: bool = True
    silent_for: float = 0.0

    @property
    def last_step(self) -> float | None:
        """The last step that any value has; None without steps."""
        return max((points[-1][0] for points in self.series.values()), default=None) if self.has_steps else None

    @property
    def restarts(self) -> list[float]:
        """When the process was started again, in seconds since the run began."""
        return [start.time - self.began for start in self.starts[1:] if math.isfinite(start.time)]


def find_log(path: Path) -> Path:
    """The log that `path` means: the file itself, `log.jsonl` in the folder, or the only one up to three folders below.

    Raises:
        ConfigError: there is none; the message says what was looked for and what lies there.
    """
    if isinstance(path, ObjectPath):
        if (found := fetch_log(path)) is None:
            raise ConfigError(f"{path} holds no {FILE}, or several: give the place of one run that contains a {FILE}")
        return found
    if os.path.isfile(path):
        return path
    if os.path.isfile(path / FILE):
        return path / FILE
    if not os.path.isdir(path):
        near = next((parent for parent in path.absolute().parents if os.path.isdir(parent)), Path("/"))
        raise ConfigError(
            f"there is no run at {path}: give the folder of a run, in which its {FILE} lies, or that file; "
            f"in {near} there are {_list_names(near)}"
        )
    below = sorted(str(found.parent) for depth in ("*", "*/*", "*/*/*") for found in path.glob(f"{depth}/{FILE}"))
    if len(below) == 1:
        return Path(below[0]) / FILE
    if below:
        named = " ".join(below[:5]) + (f" and {len(below) - 5} more" if len(below) > 5 else "")
        raise ConfigError(f"{path} holds no {FILE} itself, but folders below it do: headway report {named}")
    raise ConfigError(
        f"{path} is not a run: looked for {path / FILE}, and for one up to three folders below; in {path} there are "
        f"{_list_names(path)}"
    )


def _list_names(folder: Path) -> str:
    return listed(sorted(entry.name + ("/" if entry.is_dir() else "") for entry in folder.iterdir()), 8) or "no files"


def load(paths: Sequence[Path]) -> list[RunData]:
    """Read the runs, in the order given; one that is given twice is read once.

    Raises:
        ConfigError: a path holds no run, or what is there cannot be read as a log.
    """
    logs = list(dict.fromkeys(find_log(to_path(path)).resolve() for path in paths))
    if not logs:
        raise ConfigError("no run was given: name at least one folder of a run")
    with no_garbage_search():
        return [_load_run(path, label) for path, label in zip(logs, _make_labels(logs), strict=True)]


def _make_labels(logs: Sequence[Path]) -> list[str]:
    """The folder's name, with as many of its parents as tell the runs apart."""
    parts = [log.parent.parts if log.name == FILE else (*log.parent.parts, log.name) for log in logs]
    for depth in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(names[-depth:]) for names in parts]
        if len(set(labels)) == len(labels):
            return labels
    return [str(log) for log in logs]


def _load_run(path: Path, label: str) -> RunData:
    run = read_run(path)
    moments = [row[1] for points in run.values.values() for row in (points[0], points[-1])]
    moments += [each.time for each in run.starts] + [each.time for each in run.events] + [run.last_time]
    moments = [moment for moment in moments if math.isfinite(moment)]
    began, last = min(moments, default=0.0), max(moments, default=0.0)
    place = _StepAxis(run.values.values(), began)
    known = run.starts, began, last - began, run.is_ended, _is_torn(path), run.damaged
    config, summary = dict(leaves(run.config, ".")), dict(leaves(run.summary or {}, "."))
    data = RunData(label, path, run.project, config, *known, summary=summary)
    data.has_steps, data.silent_for = place.has_steps, max(0.0, time.time() - last)
    for name, found in (run.measured | run.values).items():
        if points := place.points(found):
            data.series[name] = points
        else:
            data.texts[name] = str(found[-1][2])
    data.events = _collect_events(run, place)
    if data.has_steps and not any(name.endswith("_per_second") for name in data.series):
        longest = max((data.series[name] for name in run.values if name in data.series), key=len, default=[])
        speed = list(_steps_per_second(longest, data.restarts))
        if len(speed) >= _FEWEST_SPEEDS:
            data.series["steps_per_second"] = speed
    return data


def _steps_per_second(points: Sequence[Point], restarts: Sequence[float]) -> Iterator[Point]:
    """From when values were logged, where the run logs no speed of its own; not over a restart."""
    for (step, seconds, _), (next_step, next_seconds, _) in pairwise(points):
        if next_step > step and next_seconds > seconds and not any(seconds < at <= next_seconds for at in restarts):
            yield next_step, next_seconds, (next_step - step) / (next_seconds - seconds)


class _StepAxis:
    """Puts what came without a step at the step that the run had reached by then."""

    def __init__(self, series: Iterable[Sequence[tuple[int | None, float, Any]]], began: float) -> None:
        known = (
            [(moment, step) for step, moment, _ in points if step is not None]
            for points in sorted(series, key=len, reverse=True)
        )
        longest = sorted(next(filter(None, known), []))
        self.began = began
        self.has_steps = bool(longest)
        self._times = [moment for moment, _ in longest]
        self._steps = [step for _, step in longest]

    def seconds(self, moment: float) -> float:
        return moment - self.began if math.isfinite(moment) else 0.0

    def step(self, step: int | None, moment: float) -> float:
        if not self.has_steps:
            return self.seconds(moment)
        if step is None:
            step = self._steps[max(0, bisect_right(self._times, moment) - 1)]
        return max(-_MAX_STEP, min(_MAX_STEP, step))

    def points(self, rows: Sequence[tuple[int | None, float, Any]]) -> list[Point]:
        """The numbers among the rows, in the order of their steps."""
        began = self.began
        found: list[Point]
        if all(type(value) is float and step is not None for step, _, value in rows):
            found = [(step or 0, moment - began, value) for step, moment, value in rows]
        else:
            found = [
                self._place_point(step, moment, value) for step, moment, value in rows if not isinstance(value, str)
            ]
        found.sort(key=itemgetter(0))
        has_far_steps = bool(found) and not -_MAX_STEP <= found[0][0] <= found[-1][0] <= _MAX_STEP
        if has_far_steps or not math.isfinite(sum(map(itemgetter(1), found))):
            found = [
                (max(-_MAX_STEP, min(_MAX_STEP, step)), seconds if math.isfinite(seconds) else 0.0, value)
                for step, seconds, value in found
            ]
        return found

    def _place_point(self, step: int | None, moment: float, value: float) -> Point:
        try:
            number = float(value)
        except OverflowError:  # an integer beyond the range of floats
            number = math.inf if value > 0 else -math.inf
        return self.step(step, moment), self.seconds(moment), number


def _collect_events(run: LoggedRun, place: _StepAxis) -> list[PlacedEvent]:
    found = [
        PlacedEvent(
            each.name, place.step(each.step, each.time), place.seconds(each.time), each.details, each.step is not None
        )
        for each in run.events
    ]
    # The launcher's restarts are events of the log; others, a scheduler's say, are told by nothing but the next start.
    told = [index for index, event in enumerate(found) if event.kind == "restart"]
    ends = [*(start.time for start in run.starts[2:]), math.inf]
    for start, end in zip(run.starts[1:], ends, strict=False):
        known = [index for index in told if start.time - 1 <= run.events[index].time < end - 1]
        details: dict[str, Any] = {}
        if start.last_step is not None:
            details["after_step"] = start.last_step
        if math.isfinite(start.time - start.last_time):
            details["pause_seconds"] = max(0.0, start.time - start.last_time)
        if known:
            event = found[known[0]]
            told_too = {name: value for name, value in event.details.items() if value}  # of a scheduler's restarts, 0
            # Its process knew no update yet: its sign stands where the run had come to.
            found[known[0]] = replace(event, step=place.step(start.last_step, start.time), details=told_too | details)
        elif not start.is_after_end:
            at = place.step(start.last_step, start.time), place.seconds(start.time)
            found.append(PlacedEvent("restart", *at, {"attempt": start.attempt} | details, has_step=False))
    return sorted(found, key=lambda event: event.seconds)


def _is_torn(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return False
        file.seek(size - 1)
        return file.read(1) != b"\n"
