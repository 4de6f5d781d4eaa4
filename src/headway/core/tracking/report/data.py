"""Data of a report: find and load runs, and place their values on step and time axes.

`series.py` then downsamples long series to buckets that keep all extremes. nan and inf are marked separately. A chart
is a few hundred pixels wide. Of a million values, each column of pixels can show only the lowest value, the highest
value and where most values are. So a bucket keeps minimum, maximum and mean. The area between minimum and maximum
covers exactly the pixels that a line through all values would cover. This is the argument of Jugel, Jerzak,
Hackenbroich and Markl, "M4: A Visualization-Oriented Time Series Data Aggregation", VLDB 2014. Their method, M4, draws
a line through the first, last, lowest and highest point of each column.

A smoothed line can be computed from means without bias. Points chosen by shape, such as those of LTTB (Steinarsson,
2013), do not allow this and can omit extremes. Unlike M4's, these buckets contain equal numbers of values rather
than equal spans, because they are drawn over two axes.
"""

import math
import os
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from headway.common.garbage import pause_garbage_collection
from headway.common.object_path import ObjectPath, to_path
from headway.common.text import join_names
from headway.core import extensions
from headway.core.tracking.runlog import FILE, list_leaves
from headway.core.tracking.runlog_reader import LoggedRun, ProcessStart, read_run
from headway.errors import ConfigError

Point = tuple[float, float, float]
"""Triple of step, seconds since the start of the run, and value."""

MAX_MARKS = 150
"""Maximum number of marks for non-finite values in one series. If there are more, neighboring marks are merged."""
_MAX_STEP = 2**53
"""Largest step up to which a float can represent all integers. The page's script stores steps as floats."""
_FEWEST_SPEEDS = 10
_DEPTH = 5
"""Maximum depth of the folders that are searched for runs, counted from a given folder.

Those of `make demo` are four folders below the clone.
"""
_MAX_ENTRIES = 20_000
"""Maximum number of directory entries that a search for nearby runs reads, which takes less than 0.1 s."""


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
        began: Time of the first line, in seconds since 1970.
        seconds: Seconds from the first line to the last.
        is_finished: Whether the log has an "end" line.
        is_torn: Whether the last line is incomplete, because the run was killed while writing it.
        damaged: Numbers of the lines that could not be read.
        series: Points of each value, by its name, in the order of their steps.
        texts: Last text of each value that is not a number, by its name.
        events: Run events in order of time.
        summary: Final values from the end of the run.
        has_steps: Whether some value has a step. Otherwise the step axis shows seconds.
        silent_for: Seconds between the last line and the creation of this report.
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
        """Highest step at which a value was logged; None if no value has a step."""
        return max((points[-1][0] for points in self.series.values()), default=None) if self.has_steps else None

    @property
    def restarts(self) -> list[float]:
        """Times of process restarts, in seconds since the start of the run."""
        return [start.time - self.began for start in self.starts[1:] if math.isfinite(start.time)]


def find_log(path: Path) -> Path:
    """Return the path of the run log for `path`.

    The log is `path` itself, `log.jsonl` in the folder `path`, or the only log up to five folders below it. A log in an
    object store is downloaded, and the path of the local copy is returned.

    Raises:
        ConfigError: If there is no log, or more than one. The message names runs in nearby folders of this machine.
    """
    if isinstance(path, ObjectPath):
        found: Path | None = extensions.load("feature", "mirror_log").fetch_log(path)
        if found is None:
            raise ConfigError(
                f"{path} contains no {FILE}, or several. Give the folder of one run that contains a {FILE}"
            )
        return found
    if os.path.isfile(path):
        return path
    if os.path.isfile(path / FILE):
        return path / FILE
    if not os.path.isdir(path):
        near = next((parent for parent in path.absolute().parents if os.path.isdir(parent)), Path("/"))
        raise ConfigError(
            f"there is no run at {path}: give the folder of a run, which contains a {FILE}, or that file; {_list_runs(near)}"
        )
    below = sorted(str(found.parent) for found in _find_logs_nearby(path))
    if len(below) == 1:
        return Path(below[0]) / FILE
    if below:
        named = " ".join(below[:5]) + (f" and {len(below) - 5} more" if len(below) > 5 else "")
        raise ConfigError(f"{path} contains no {FILE} itself, but folders below it do: headway report {named}")
    raise ConfigError(
        f"{path} is not a run: there is no {path / FILE}, and none up to {_DEPTH} folders below; {_list_runs(path.absolute().parent)}"
    )


def _list_runs(folder: Path) -> str:
    """Return a clause for error messages that names the runs up to `_DEPTH` folders below `folder`, newest first."""
    newest = sorted(_find_logs_nearby(folder), key=os.path.getmtime, reverse=True)
    names = [os.path.relpath(log.parent) for log in newest]
    return (
        f"there are runs at {join_names(names)}"
        if names
        else f"no run was found in {folder}, or up to {_DEPTH} folders below it"
    )


def _find_logs_nearby(folder: Path) -> Iterator[Path]:
    """Yield the run logs in `folder` and up to `_DEPTH` folders below it. Hidden folders are not searched.

    The search ends after about `_MAX_ENTRIES` directory entries, because the folder might be a large one, such as the
    home directory.
    """
    level = [folder]
    num_seen = 0
    for _ in range(_DEPTH + 1):
        below: list[Path] = []
        for place in level:
            if not os.access(place, os.R_OK | os.X_OK):
                continue
            with os.scandir(place) as entries:
                for entry in islice(entries, _MAX_ENTRIES):
                    num_seen += 1
                    if entry.name == FILE and entry.is_file():
                        yield Path(entry.path)
                    elif not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                        below.append(Path(entry.path))
            if num_seen > _MAX_ENTRIES:
                return
        level = below


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
    run = read_run(path)
    moments = [row[1] for points in run.values.values() for row in (points[0], points[-1])]
    moments += [each.time for each in run.starts] + [each.time for each in run.events] + [run.last_time]
    moments = [moment for moment in moments if math.isfinite(moment)]
    began, last = min(moments, default=0.0), max(moments, default=0.0)
    place = _StepAxis(run.values.values(), began)
    known = run.starts, began, last - began, run.is_ended, _is_torn(path), run.damaged
    config, summary = dict(list_leaves(run.config, ".")), dict(list_leaves(run.summary or {}, "."))
    data = RunData(label, path, run.project, config, *known, summary=summary)
    data.has_steps = place.has_steps
    data.silent_for = max(0.0, time.time() - last)
    for name, found in (run.measured | run.values).items():
        if points := place.points(found):
            data.series[name] = points
        else:
            data.texts[name] = str(found[-1][2])
    data.events = _collect_events(run, place)
    if data.has_steps and not any(name.endswith("_per_second") for name in data.series):
        longest = max((data.series[name] for name in run.values if name in data.series), key=len, default=[])
        speed = list(_measure_steps_per_second(longest, data.restarts))
        if len(speed) >= _FEWEST_SPEEDS:
            data.series["steps_per_second"] = speed
    return data


def _measure_steps_per_second(points: Sequence[Point], restarts: Sequence[float]) -> Iterator[Point]:
    """Yield points with the steps per second between two logged values, for runs that do not log their speed.

    Intervals that contain a restart are skipped.

    Args:
        points: Points of one series, in the order of their steps.
        restarts: Times of process restarts, in seconds since the start of the run.
    """
    for (step, seconds, _), (next_step, next_seconds, _) in pairwise(points):
        if next_step > step and next_seconds > seconds and not any(seconds < at <= next_seconds for at in restarts):
            yield next_step, next_seconds, (next_step - step) / (next_seconds - seconds)


class _StepAxis:
    """Step axis and time axis of a run's charts, on which logged values are placed.

    A value without a step gets the step that the run had reached at that time. If no value has a step, the step axis
    shows seconds.

    Args:
        series: Points (step or None, seconds since 1970, value) of each series.
        began: Start of the run, in seconds since 1970.
    """

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
        """Return logged numbers as points (step, seconds since the run's start, value), in the order of their steps.

        A value without a step gets the step that the run had reached at that time. If no value of the run has a step,
        the seconds take the place of the step. Values that are strings are left out.

        Args:
            rows: Tuples of (step or None, seconds since 1970, value).
        """
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
    # Restarts by the launcher are events in the log. Others, such as a scheduler's, show only as the next start.
    logged_restarts = [index for index, event in enumerate(found) if event.kind == "restart"]
    ends = [*(start.time for start in run.starts[2:]), math.inf]
    for start, end in zip(run.starts[1:], ends, strict=False):
        known = [index for index in logged_restarts if start.time - 1 <= run.events[index].time < end - 1]
        details: dict[str, Any] = {}
        if start.last_step is not None:
            details["after_step"] = start.last_step
        if math.isfinite(start.time - start.last_time):
            details["pause_seconds"] = max(0.0, start.time - start.last_time)
        if known:
            event = found[known[0]]
            logged_details = {
                name: value for name, value in event.details.items() if value
            }  # 0 for a scheduler's restart
            # The new process had not counted any update yet, so place the sign where the run had stopped.
            found[known[0]] = replace(
                event, step=place.step(start.last_step, start.time), details=logged_details | details
            )
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
