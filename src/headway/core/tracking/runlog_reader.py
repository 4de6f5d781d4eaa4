"""Reader of run logs, which also handles the logs of runs that were killed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.core.tracking.runlog import (
    _WORDS,
    FILE,
    FORMAT,
    MEASURED,
    SUPERSEDING,
    Point,
    _describe_other_file,
    _parse_line,
)
from headway.errors import TrackingError


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
        is_after_end: Whether the run had ended properly before this start.
        last_time: Time of the last line before this start, in seconds since 1970; nan for the first start.
        last_step: Last step that was logged before this start; None if there was none.
        project: Name of the run.
        config: Configuration of the run.
        world_size: Number of processes.
        device: Type of device.
        versions: Versions of packages, by their names.
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
        damaged: Numbers of the lines that could not be read, except an incomplete last line.
    """

    path: Path
    starts: list[ProcessStart] = field(default_factory=list)
    values: dict[str, list[Point]] = field(default_factory=dict)
    measured: dict[str, list[Point]] = field(default_factory=dict)
    events: list[LoggedEvent] = field(default_factory=list)
    media: list[LoggedFile] = field(default_factory=list)
    summary: dict[str, Any] | None = None
    last_time: float = 0.0
    damaged: list[int] = field(default_factory=list)

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
    run, reader = LoggedRun(file), None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        entry = _parse_line(line)
        if entry is None and reader is None and number < len(lines):
            raise TrackingError(_describe_other_file(file))
        if entry is None:
            if number < len(lines):
                run.damaged.append(number)
            continue
        reader = reader or _LogReader(run)
        try:
            reader.take_line(entry)
        except TrackingError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError):
            run.damaged.append(number)
    if reader is None:
        if lines[0].strip() and not lines[0].startswith(b'{"kind":"run"'[: len(lines[0])]):
            raise TrackingError(_describe_other_file(file))
        raise TrackingError(f"{file} has no complete line yet; has the run begun?")
    reader.finish()
    return run


def _locate_log(path: Path) -> Path:
    file = path / FILE if path.is_dir() else path
    if file.is_file():
        return file
    if path.is_dir():
        others = sorted(each.parent.name for each in path.glob(f"*/{FILE}"))
        hint = f"give one of its folders: {', '.join(others)}" if others else "runs log where init_trackers was called"
        raise TrackingError(f"{path} holds no {FILE}; {hint}")
    raise TrackingError(f"{path} does not exist; give a run's folder or its {FILE}")


class _LogReader:
    """Reader that processes the lines of a run log in order, and removes superseded points at the end.

    It divides the log into numbered parts. A new part begins at each process start, and whenever the run returns to
    an earlier step. The reader stores each point with the number of its part. From these numbers, `finish`
    determines which points a later part superseded.
    """

    def __init__(self, run: LoggedRun) -> None:
        self.run = run
        self.points: dict[str, list[tuple[int, Point]]] = {}
        self.media: list[tuple[int, LoggedFile]] = []
        self.attempt = 0
        self.last_step: int | None = None
        # For each part (era): the number of the process start, and the step to which the run returned at its beginning.
        self.eras: list[tuple[int, float]] = [(0, math.inf)]

    def take_line(self, entry: Mapping[str, Any]) -> None:
        moment, kind = float(entry["time"]), entry["kind"]
        if kind == "run":
            self._start_attempt(moment, entry)
        self.run.last_time = moment
        if kind == "values":
            step = entry.get("step")
            self.last_step = self.last_step if step is None else step
            for name, value in dict(entry["values"]).items():
                known = _WORDS.get(value, value) if isinstance(value, str) else value
                if isinstance(known, int | float | str):
                    self.points.setdefault(name, []).append((len(self.eras) - 1, (step, moment, known)))
        elif kind == "event":
            event = LoggedEvent(str(entry["event"]), entry.get("step"), moment, dict(entry.get("details") or {}))
            self.run.events.append(event)
            if event.name in SUPERSEDING and event.step is not None:
                self.eras.append((self.attempt, event.step))
        elif kind in ("image", "artifact"):
            where = self.run.path.parent / str(entry["file"])
            medium = LoggedFile(kind, str(entry["name"]), entry.get("step"), moment, where)
            self.media.append((len(self.eras) - 1, medium))
        elif kind == "reopened":
            self.run.summary = None
        elif kind == "end":
            self.run.summary = dict(entry.get("summary") or {})

    def _start_attempt(self, moment: float, entry: Mapping[str, Any]) -> None:
        version = entry.get("format")
        if not isinstance(version, int) or version > FORMAT:
            raise TrackingError(
                f"{self.run.path} is of format {version!r}, and this version of Headway reads up to {FORMAT}; upgrade it"
            )
        self.attempt += 1
        self.eras.append((self.attempt, math.inf))
        is_after_end, self.run.summary = self.run.summary is not None, None
        self.run.starts.append(
            ProcessStart(
                moment,
                self.attempt,
                str(entry.get("project", "")),
                dict(entry.get("config") or {}),
                int(entry.get("world_size", 1)),
                str(entry.get("device", "")),
                dict(entry.get("versions") or {}),
                is_after_end,
                self.run.last_time if self.run.starts else math.nan,
                self.last_step,
            )
        )

    def finish(self) -> None:
        """Store the points, images and artifacts in the `LoggedRun`, except superseded ones.

        A point, image or artifact is superseded if the run later returned to an earlier step. A point is also
        superseded if a later process logged the same value again for the same step.
        """
        lowest, limits = math.inf, []
        for _, step in reversed(self.eras):
            limits.append(lowest)
            lowest = min(lowest, step)
        limits.reverse()
        is_cut = lowest < math.inf
        self.run.media = [each for era, each in self.media if each.step is None or each.step <= limits[era]]
        for name, points in self.points.items():
            if is_cut:
                points = [each for each in points if each[1][0] is None or each[1][0] <= limits[each[0]]]
            newest: dict[int, int] = {}
            for era, (number, _, _) in points:
                if number is not None:
                    newest[number] = max(self.eras[era][0], newest.get(number, 0))
            kept = [point for era, point in points if point[0] is None or self.eras[era][0] == newest[point[0]]]
            if kept:
                is_own = name.startswith(MEASURED)
                (self.run.measured if is_own else self.run.values)[name.removeprefix(MEASURED)] = kept
