"""Reader of run logs, which also handles the logs of runs that were killed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from headway.core.tracking.runlog import (
    FILE,
    FORMAT,
    MEASURED,
    RUN_LINE_START,
    SUPERSEDING,
    Point,
    Value,
    describe_other_file,
    parse_line,
)
from headway.errors import TrackingError

_NON_FINITE_TEXTS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""Floats that strict JSON cannot represent, by the texts that stand for them in a run log."""


@dataclass(frozen=True)
class LoggedEvent:
    """Run event that was read from a run log.

    Attributes:
        name: Kind of event, such as "out_of_memory", "restart", "resumed" or "checkpoint".
        step: Number of optimizer updates at which the event occurred, or None.
        time: Time of the event, in seconds since 1970.
        details: Details of the event.
    """

    name: str
    step: int | None
    time: float
    details: dict[str, Any]


@dataclass(frozen=True)
class LoggedFile:
    """Image or artifact that was read from a run log.

    Attributes:
        kind: "image" or "artifact".
        name: Name of the image or artifact.
        step: Step for which the file was logged, or None.
        time: Time at which the file was logged, in seconds since 1970.
        path: Path of the file, which might no longer exist.
    """

    kind: str
    name: str
    step: int | None
    time: float
    path: Path


@dataclass(frozen=True)
class ProcessStart:
    """Start of the training script, as read from its run log. A run that was restarted has several starts.

    Attributes:
        time: Time of the start, in seconds since 1970.
        attempt: Number of the start, from 1.
        project: Name of the run.
        config: Configuration of the run.
        world_size: Number of processes.
        device: Type of device.
        versions: Versions of packages, by their names.
        is_after_end: Whether the run had ended properly before this start.
        last_time: Time of the last line before this start, in seconds since 1970; nan for the first start.
        last_step: Last step that was logged before this start; None if there was none.
    """

    time: float
    attempt: int
    project: str
    config: dict[str, Any]
    world_size: int
    device: str
    versions: dict[str, str]
    is_after_end: bool = False
    last_time: float = math.nan
    last_step: int | None = None


class LogCall(NamedTuple):
    """Call of `accelerator.log` whose values are in a run log.

    Attributes:
        time: Time of the call, in seconds since 1970.
        step: Step of the values, or None.
        values: Values by name.
    """

    time: float
    step: int | None
    values: dict[str, Value]


@dataclass
class LoggedRun:
    """Contents of a run log.

    Attributes:
        path: Path of the log file.
        starts: Process starts, in order.
        values: Points (step, time, value) by name, in the order logged. Points that a later restart logged again are
            left out.
        measured: Points of the values that the library measured itself, by name: "memory" (in bytes) and "grad_norm".
        events: All run events, in order.
        media: Images and artifacts, without those that a later restart logged again.
        summary: Summary written when the run ended; None if the run is still in progress or was killed.
        last_time: Time of the last line, in seconds since 1970.
        damaged_lines: Numbers of the lines that could not be read, except an incomplete last line.
    """

    path: Path
    starts: list[ProcessStart] = field(default_factory=list)
    values: dict[str, list[Point]] = field(default_factory=dict)
    measured: dict[str, list[Point]] = field(default_factory=dict)
    events: list[LoggedEvent] = field(default_factory=list)
    media: list[LoggedFile] = field(default_factory=list)
    summary: dict[str, Any] | None = None
    last_time: float = 0.0
    damaged_lines: list[int] = field(default_factory=list)

    @property
    def config(self) -> dict[str, Any]:
        """Configuration of the last process start; empty if there is none."""
        return self.starts[-1].config if self.starts else {}

    @property
    def project(self) -> str:
        """Name of the run; the name of the log's folder if the log contains none."""
        return self.starts[-1].project if self.starts else self.path.parent.name

    @property
    def is_ended(self) -> bool:
        """Whether the run has ended: the process that started last has written the log's "end" line."""
        return self.summary is not None

    def find_first_step(self) -> int | None:
        """Return the lowest step for which the log has a value, or None if there is none."""
        steps = [point.step for points in self.values.values() for point in points if point.step is not None]
        return min(steps, default=None)

    def list_log_calls(self, last_step: int) -> list[LogCall]:
        """Return the `accelerator.log` calls that logged the run's values, in chronological order.

        Values that the library itself measured are left out.

        Args:
            last_step: Highest step to include. Values without a step are always included.
        """
        # Values that were logged in one call have one time and step.
        values_by_call: dict[tuple[float, int | None], dict[str, Value]] = {}
        for name, points in self.values.items():
            for point in points:
                if point.step is None or point.step <= last_step:
                    values_by_call.setdefault((point.time, point.step), {})[name] = point.value
        calls = [LogCall(moment, step, values) for (moment, step), values in values_by_call.items()]
        return sorted(calls, key=lambda call: call.time)


def read_run(path: str | Path) -> LoggedRun:
    """Read the log of a run, which may have ended, been killed, or still be in progress.

    Args:
        path: Path of `log.jsonl` or of its folder.

    Raises:
        TrackingError: If there is no run log, the file is not a run log or has no complete line yet, or a later version
            of Headway wrote it.
    """
    file = _locate_log(Path(path))
    lines = file.read_bytes().split(b"\n")
    run = LoggedRun(file)
    reader: _LogReader | None = None  # created for the first line that can be parsed
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        entry = parse_line(line)
        if entry is None:
            if number < len(lines):  # the last line may be incomplete
                if reader is None:
                    raise TrackingError(describe_other_file(file))
                run.damaged_lines.append(number)
            continue
        reader = reader or _LogReader(run)
        try:
            reader.process_entry(entry)
        except TrackingError:
            raise  # it is a ValueError, too, but the line is not damaged
        except (KeyError, TypeError, ValueError, AttributeError):
            run.damaged_lines.append(number)
    if reader is None:
        if lines[0].strip() and not lines[0].startswith(RUN_LINE_START[: len(lines[0])]):
            raise TrackingError(describe_other_file(file))
        raise TrackingError(f"{file} has no complete line yet; has the run begun?")
    reader.drop_superseded()
    return run


def _locate_log(path: Path) -> Path:
    """Return the path of the log file, for the path of the file or of its folder.

    Raises:
        TrackingError: If there is no log file. The message names the logs in the folder's subfolders.
    """
    file = path / FILE if path.is_dir() else path
    if file.is_file():
        return file
    if path.is_dir():
        others = sorted(each.parent.name for each in path.glob(f"*/{FILE}"))
        hint = f"give one of its folders: {', '.join(others)}" if others else "runs log where init_trackers was called"
        raise TrackingError(f"{path} contains no {FILE}; {hint}")
    raise TrackingError(f"{path} does not exist; give a run's folder or its {FILE}")


class LogSection(NamedTuple):
    """Section of a run log. A new one begins at each process start, and whenever the run returns to an earlier step.

    Attributes:
        attempt: Number of the process start, from 1; 0 before the first one.
        returned_to: Step to which the run returned at the beginning of the section; infinity if it did not.
    """

    attempt: int
    returned_to: float


class _LogReader:
    """Reader that processes the lines of a run log in order, and removes superseded points at the end.

    It stores each point with the index of its section of the log (`LogSection`). From these indices, `drop_superseded`
    determines which points a later section superseded.

    Args:
        run: Run to which the contents of the log are added.
    """

    def __init__(self, run: LoggedRun) -> None:
        self._run = run
        self._points: dict[str, list[tuple[int, Point]]] = {}  # pairs of (index of the section, point), by name
        self._media: list[tuple[int, LoggedFile]] = []  # pairs of (index of the section, image or artifact)
        self._attempt = 0  # number of process starts so far
        self._last_step: int | None = None  # step of the latest values that had one
        self._sections = [LogSection(0, math.inf)]

    def process_entry(self, entry: Mapping[str, Any]) -> None:
        """Add the content of one line to the run.

        Raises:
            TrackingError: If a later version of Headway wrote the log.
            KeyError, TypeError, ValueError, AttributeError: If the line is damaged.
        """
        moment, kind = float(entry["time"]), entry["kind"]
        if kind == "run":
            self._start_attempt(moment, entry)
        self._run.last_time = moment
        if kind == "values":
            self._add_values(moment, entry)
        elif kind == "event":
            self._add_event(moment, entry)
        elif kind in ("image", "artifact"):
            path = self._run.path.parent / str(entry["file"])
            file = LoggedFile(kind, str(entry["name"]), entry.get("step"), moment, path)
            self._media.append((self._section_index, file))
        elif kind == "reopened":
            self._run.summary = None
        elif kind == "end":
            self._run.summary = dict(entry.get("summary") or {})

    @property
    def _section_index(self) -> int:
        """Index of the current section of the log."""
        return len(self._sections) - 1

    def _add_values(self, moment: float, entry: Mapping[str, Any]) -> None:
        """Add the values of a log line to the points of their series.

        Args:
            moment: Time of the line in seconds since the epoch.
            entry: JSON object of the line.
        """
        step = entry.get("step")
        if step is not None:
            self._last_step = step
        for name, logged in dict(entry["values"]).items():
            value = logged
            if isinstance(logged, str):
                value = _NON_FINITE_TEXTS.get(logged, logged)  # JSON has no numbers for NaN and infinity
            if isinstance(value, int | float | str):
                self._points.setdefault(name, []).append((self._section_index, Point(step, moment, value)))

    def _add_event(self, moment: float, entry: Mapping[str, Any]) -> None:
        """Add the event of a log line. An event after which earlier steps are repeated also begins a new section of the log.

        Args:
            moment: Time of the line in seconds since the epoch.
            entry: JSON object of the line.
        """
        event = LoggedEvent(str(entry["event"]), entry.get("step"), moment, dict(entry.get("details") or {}))
        self._run.events.append(event)
        if event.name in SUPERSEDING and event.step is not None:
            self._sections.append(LogSection(self._attempt, event.step))

    def _start_attempt(self, moment: float, entry: Mapping[str, Any]) -> None:
        """Add a process start to the run.

        Raises:
            TrackingError: If a later version of Headway wrote the log.
        """
        version = entry.get("format")
        if not isinstance(version, int) or version > FORMAT:
            raise TrackingError(
                f"{self._run.path} is of format {version!r}, and this version of Headway reads up to {FORMAT}; upgrade it"
            )
        self._attempt += 1
        self._sections.append(LogSection(self._attempt, math.inf))
        is_after_end = self._run.summary is not None
        self._run.summary = None
        self._run.starts.append(
            ProcessStart(
                time=moment,
                attempt=self._attempt,
                project=str(entry.get("project", "")),
                config=dict(entry.get("config") or {}),
                world_size=int(entry.get("world_size", 1)),
                device=str(entry.get("device", "")),
                versions=dict(entry.get("versions") or {}),
                is_after_end=is_after_end,
                last_time=self._run.last_time if self._run.starts else math.nan,
                last_step=self._last_step,
            )
        )

    def drop_superseded(self) -> None:
        """Store the points, images and artifacts in the `LoggedRun`, except superseded ones.

        A point, image or artifact is superseded if the run later returned to an earlier step. A point is also
        superseded if a later process logged the same value again for the same step.
        """
        last_steps = self._list_last_steps()
        self._run.media = [
            medium for section, medium in self._media if medium.step is None or medium.step <= last_steps[section]
        ]
        for name, points in self._points.items():
            kept = self._select_points(points, last_steps)
            if kept:
                target = self._run.measured if name.startswith(MEASURED) else self._run.values
                target[name.removeprefix(MEASURED)] = kept

    def _list_last_steps(self) -> list[float]:
        """Return the last valid step of each section: the lowest step to which a later section returned."""
        last_steps = []
        lowest_return = math.inf
        for section in reversed(self._sections):
            last_steps.append(lowest_return)
            lowest_return = min(lowest_return, section.returned_to)
        last_steps.reverse()
        return last_steps

    def _select_points(self, points: Sequence[tuple[int, Point]], last_steps: Sequence[float]) -> list[Point]:
        """Return the points of one value that were not superseded, in order.

        Args:
            points: Pairs of (index of the section, point).
            last_steps: Last valid step of each section.
        """
        valid: list[tuple[int, Point]] = []  # pairs of (attempt, point)
        last_attempts: dict[int, int] = {}  # last attempt that logged the value, by step
        for section_index, point in points:
            if point.step is not None and point.step > last_steps[section_index]:
                continue
            attempt = self._sections[section_index].attempt
            valid.append((attempt, point))
            if point.step is not None:
                last_attempts[point.step] = max(attempt, last_attempts.get(point.step, 0))
        return [point for attempt, point in valid if point.step is None or attempt == last_attempts[point.step]]
