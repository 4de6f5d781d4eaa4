"""Data of a report: load runs from their logs, and place their values and events on step and time axes."""

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

from headway.common.garbage import pause_garbage_collection
from headway.common.object_path import to_path
from headway.core.tracking.report.log_search import find_log
from headway.core.tracking.runlog import FILE, list_leaves
from headway.core.tracking.runlog_reader import LoggedRun, ProcessStart, read_run
from headway.errors import ConfigError

PlacedPoint = tuple[float, float, float]
"""Triple of step, seconds since the start of the run, and value."""

_MAX_STEP = 2**53
"""Largest step up to which a float can represent all integers. The page's script stores steps as floats."""
_MIN_SPEED_POINTS = 10
"""Minimum number of points for a chart of steps per second."""


@dataclass(frozen=True)
class PlacedEvent:
    """Run event with its position on the step axis and on the time axis of the charts.

    Attributes:
        kind: Kind of event, such as "out_of_memory" or "checkpoint".
        step: Position on the step axis.
        seconds: Seconds since the start of the run.
        details: Details of the event from the log.
        has_step: Whether the log contains a step. Otherwise the position was derived from the time.
    """

    kind: str
    step: float
    seconds: float
    details: Mapping[str, Any]
    has_step: bool = True


@dataclass
class RunData:
    """Data of one run for a report.

    Attributes:
        label: Unique name on the page.
        path: Path of the log.
        project: Project name in the log, as passed to `init_trackers`.
        config: Flat configuration, with names like "optimizer.lr" for nested values.
        starts: Process starts, with world size, device and versions.
        start_time: Time of the first line, in seconds since 1970.
        seconds: Seconds from the first line to the last.
        is_finished: Whether the log has an "end" line.
        ends_in_partial_line: Whether the last line is incomplete, because the run was killed while writing it.
        damaged_lines: Numbers of the lines that could not be read.
        series: Points of each value, by its name, in the order of their steps.
        texts: Last text of each value that is not a number, by its name.
        events: Run events in order of time.
        summary: Final values from the end of the run.
        has_steps: Whether some value has a step. Otherwise the step axis shows seconds.
        seconds_since_last_line: Seconds between the last line and the creation of this report.
    """

    label: str
    path: Path
    project: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    starts: list[ProcessStart] = field(default_factory=list)
    start_time: float = 0.0
    seconds: float = 0.0
    is_finished: bool = False
    ends_in_partial_line: bool = False
    damaged_lines: list[int] = field(default_factory=list)
    series: dict[str, list[PlacedPoint]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    events: list[PlacedEvent] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    has_steps: bool = True
    seconds_since_last_line: float = 0.0

    @property
    def last_step(self) -> float | None:
        """Highest step at which a value was logged; None if no value has a step."""
        return max((points[-1][0] for points in self.series.values()), default=None) if self.has_steps else None

    @property
    def restarts(self) -> list[float]:
        """Times of process restarts, in seconds since the start of the run."""
        return [start.time - self.start_time for start in self.starts[1:] if math.isfinite(start.time)]


def load(paths: Sequence[Path]) -> list[RunData]:
    """Load the runs in the order of `paths`. A run that occurs twice is loaded once.

    Args:
        paths: Log files, folders, or paths in an object store.

    Raises:
        ConfigError: If there are no paths, or a path contains no run or several runs.
        TrackingError: If a file is not a run log, has no complete line yet, or was written by a later version of
            Headway.
    """
    logs = list(dict.fromkeys(find_log(to_path(path)).resolve() for path in paths))
    if not logs:
        raise ConfigError("no run was given: name at least one folder of a run")
    with pause_garbage_collection():
        return [_load_run(path, label) for path, label in zip(logs, _make_labels(logs), strict=True)]


def _make_labels(logs: Sequence[Path]) -> list[str]:
    """Return the name of each run's folder, with as many parent folders as are needed to distinguish the runs."""
    parts = [log.parent.parts if log.name == FILE else (*log.parent.parts, log.name) for log in logs]
    for depth in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(names[-depth:]) for names in parts]
        if len(set(labels)) == len(labels):
            return labels
    return [str(log) for log in logs]


def _load_run(path: Path, label: str) -> RunData:
    """Load a run's log, and place its values and events on the axes of the charts.

    Raises:
        TrackingError: If the file is not a run log, has no complete line yet, or was written by a later version.
    """
    run = read_run(path)
    start_time, last_time = _find_time_range(run)
    axis = _StepAxis(run.values.values(), start_time)
    data = RunData(
        label=label,
        path=path,
        project=run.project,
        config=dict(list_leaves(run.config, ".")),
        starts=run.starts,
        start_time=start_time,
        seconds=last_time - start_time,
        is_finished=run.is_ended,
        ends_in_partial_line=_has_partial_line(path),
        damaged_lines=run.damaged_lines,
        events=_collect_events(run, axis),
        summary=dict(list_leaves(run.summary or {}, ".")),
        has_steps=axis.has_steps,
        seconds_since_last_line=max(0.0, time.time() - last_time),
    )
    for name, logged in (run.measured | run.values).items():
        if points := axis.place_points(logged):
            data.series[name] = points
        else:
            _, _, last_text = logged[-1]
            data.texts[name] = str(last_text)
    if data.has_steps and not any(name.endswith("_per_second") for name in data.series):
        longest = max((data.series[name] for name in run.values if name in data.series), key=len, default=[])
        speed = list(_measure_steps_per_second(longest, data.restarts))
        if len(speed) >= _MIN_SPEED_POINTS:
            data.series["steps_per_second"] = speed
    return data


def _find_time_range(run: LoggedRun) -> tuple[float, float]:
    """Return the times of a log's first and last line, in seconds since 1970; (0.0, 0.0) if no time is finite."""
    times = [moment for points in run.values.values() for _, moment, _ in (points[0], points[-1])]
    times += [start.time for start in run.starts] + [event.time for event in run.events] + [run.last_time]
    finite_times = [moment for moment in times if math.isfinite(moment)]
    return min(finite_times, default=0.0), max(finite_times, default=0.0)


def _measure_steps_per_second(points: Sequence[PlacedPoint], restarts: Sequence[float]) -> Iterator[PlacedPoint]:
    """Yield points with the steps per second between two logged values, for runs that do not log their speed.

    Intervals that contain a restart are skipped.

    Args:
        points: Points of one series, in the order of their steps.
        restarts: Times of process restarts, in seconds since the start of the run.
    """
    for (step, seconds, _), (next_step, next_seconds, _) in pairwise(points):
        has_restart = any(seconds < restart <= next_seconds for restart in restarts)
        if next_step > step and next_seconds > seconds and not has_restart:
            yield next_step, next_seconds, (next_step - step) / (next_seconds - seconds)


class _StepAxis:
    """Step axis and time axis of a run's charts, on which logged values are placed.

    A value without a step gets the step that the run had reached at that time. If no value has a step, the step axis
    shows seconds.

    Args:
        series: Points (step or None, seconds since 1970, value) of each series.
        start_time: Start of the run, in seconds since 1970.
    """

    def __init__(self, series: Iterable[Sequence[tuple[int | None, float, Any]]], start_time: float) -> None:
        # The longest series with steps shows at which time the run had reached which step.
        longest: list[tuple[float, int]] = []  # pairs of (time, step)
        for points in sorted(series, key=len, reverse=True):
            longest = sorted((moment, step) for step, moment, _ in points if step is not None)
            if longest:
                break
        self.start_time = start_time
        self.has_steps = bool(longest)
        self._times = [moment for moment, _ in longest]
        self._steps = [step for _, step in longest]

    def find_seconds(self, moment: float) -> float:
        """Return the seconds from the start of the run to a time in seconds since 1970; 0.0 if it is not finite."""
        return moment - self.start_time if math.isfinite(moment) else 0.0

    def find_step(self, step: int | None, moment: float) -> float:
        """Return the position on the step axis for a logged step, or for a time if there is no step."""
        if not self.has_steps:
            return self.find_seconds(moment)
        if step is None:
            step = self._steps[max(0, bisect_right(self._times, moment) - 1)]
        return max(-_MAX_STEP, min(_MAX_STEP, step))

    def place_points(self, logged: Sequence[tuple[int | None, float, Any]]) -> list[PlacedPoint]:
        """Return logged numbers as points (step, seconds since the run's start, value), in the order of their steps.

        A value without a step gets the step that the run had reached at that time. If no value of the run has a step,
        the seconds take the place of the step. Values that are strings are left out.

        Args:
            logged: Tuples of (step or None, seconds since 1970, value).
        """
        start_time = self.start_time
        points: list[PlacedPoint]
        # The usual case is handled without a function call for each of up to millions of points.
        if all(type(value) is float and step is not None for step, _, value in logged):
            points = [(step or 0, moment - start_time, value) for step, moment, value in logged]  # `or 0` is for mypy
        else:
            points = [
                self._place_point(step, moment, value) for step, moment, value in logged if not isinstance(value, str)
            ]
        points.sort(key=itemgetter(0))
        has_far_steps = bool(points) and not -_MAX_STEP <= points[0][0] <= points[-1][0] <= _MAX_STEP
        has_finite_times = math.isfinite(sum(map(itemgetter(1), points)))
        if has_far_steps or not has_finite_times:  # only a damaged or foreign log has such values
            points = [_limit_point(point) for point in points]
        return points

    def _place_point(self, step: int | None, moment: float, value: float) -> PlacedPoint:
        """Return a point of a series: (step, seconds since the run's start, value).

        Args:
            step: Logged step, or None if the value was logged without one.
            moment: Time of the entry in seconds since the epoch.
            value: Logged number.
        """
        try:
            number = float(value)
        except OverflowError:  # an integer beyond the range of floats
            number = math.inf if value > 0 else -math.inf
        return self.find_step(step, moment), self.find_seconds(moment), number


def _collect_events(run: LoggedRun, axis: _StepAxis) -> list[PlacedEvent]:
    """Return a run's events on the axes, in order of time. Restarts that are not logged as events are added."""
    events = [
        PlacedEvent(
            kind=event.name,
            step=axis.find_step(event.step, event.time),
            seconds=axis.find_seconds(event.time),
            details=event.details,
            has_step=event.step is not None,
        )
        for event in run.events
    ]
    # Restarts by the launcher are events in the log. Others, such as a scheduler's, show only as the next start.
    restart_indices = [index for index, event in enumerate(events) if event.kind == "restart"]
    next_start_times = [*(start.time for start in run.starts[2:]), math.inf]
    for start, next_start_time in zip(run.starts[1:], next_start_times, strict=False):
        step = axis.find_step(start.last_step, start.time)
        details = _describe_pause(start)
        # An event belongs to the start at most a second after it, because its time can be slightly earlier.
        logged_at = (
            index for index in restart_indices if start.time - 1 <= run.events[index].time < next_start_time - 1
        )
        index = next(logged_at, None)
        if index is not None:
            # Details of a scheduler's restart contain a count of 0, which explains nothing.
            logged_details = {name: value for name, value in events[index].details.items() if value}
            # The new process had not counted any update yet, so place the sign where the run had stopped.
            events[index] = replace(events[index], step=step, details=logged_details | details)
        elif not start.is_after_end:
            seconds = axis.find_seconds(start.time)
            events.append(PlacedEvent("restart", step, seconds, {"attempt": start.attempt} | details, has_step=False))
    return sorted(events, key=lambda event: event.seconds)


def _describe_pause(start: ProcessStart) -> dict[str, Any]:
    """Return the details of a restart: the last step before it, and the seconds without a process, if they are known."""
    details: dict[str, Any] = {}
    if start.last_step is not None:
        details["after_step"] = start.last_step
    if math.isfinite(start.time - start.last_time):
        details["pause_seconds"] = max(0.0, start.time - start.last_time)
    return details


def _limit_point(point: PlacedPoint) -> PlacedPoint:
    """Return a point whose step is at most `_MAX_STEP` in magnitude, and whose time is finite."""
    step, seconds, value = point
    limited_step = max(-_MAX_STEP, min(_MAX_STEP, step))
    return limited_step, seconds if math.isfinite(seconds) else 0.0, value


def _has_partial_line(path: Path) -> bool:
    """Whether the last line of a file has no newline, because the file is being written or its writer was killed."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return False
        file.seek(size - 1)
        return file.read(1) != b"\n"
