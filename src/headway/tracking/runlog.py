"""A run's log: one JSON object a line, appended as things happen, and the reader that understands killed runs.

The folder is `<logging_dir>/<project_name>/`, the file `log.jsonl`; rank 0 alone writes. Every line has "kind" and "time"
(seconds since 1970):

=========  =====================================================================================================
run        a process start: format, project, config, world_size, device, versions, attempt (1, 2, ...)
values     step (or null) and values: name to number or text; not-a-number and the infinities are the texts "nan",
           "inf" and "-inf", so that each line is strict JSON, and are read back as floats
           names that begin with "headway/" are what the library measured, where the script logs no such value
event      event, step (or null) and details: "resumed", "checkpoint", "out_of_memory", ...
image      name, step, file (relative to the folder)
artifact   the same
end        summary
reopened   the process that wrote "end" writes more: such as an evaluation after the training; another "end" follows
=========  =====================================================================================================

A line is one write, so that a kill tears the last one at most; the next start takes a torn line off before it appends.
After "resumed" (or "started_over") with a step N, values of later steps that stand before it are superseded: the reader
drops them. Where two starts logged one name for one step, the later counts.
"""

import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from headway.errors import StateError, TrackingError

FILE = "log.jsonl"
FORMAT = 1
MEASURED = "headway/"
SUPERSEDING = frozenset({"resumed", "started_over"})
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MAX_DEPTH = 50
_MAX_REPR = 200

Value = float | int | bool | str
Point = tuple[int | None, float, Value]
"""Step (None where none was given), time, value."""


class RunLog:
    """Writes one process's part of a run's log; threads may share it.

    Args:
        folder: the run's folder, made where missing. A log that is there is continued.

    Attributes:
        attempt: the number of this process start in the log: 1 for the first; 0 before `run`.

    Raises:
        TrackingError: the folder holds a `log.jsonl` of something else.
        OSError: it cannot be written.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / FILE
        self._lock = threading.Lock()
        self._is_torn = False
        self.attempt = 0
        self._num_before = _remove_torn_line(self.path)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115  (closed by close())

    def run(
        self,
        project: str,
        config: Mapping[str, Any] | None = None,
        *,
        world_size: int = 1,
        device: str = "cpu",
        versions: Mapping[str, str] | None = None,
    ) -> int:
        """Begin: must be the first line that this process writes.

        Args:
            project: its name.
            config: what the run was configured with; what JSON has no form for is written as its repr.
            world_size: processes.
            device: its kind.
            versions: of packages.

        Returns:
            The attempt: how many process starts the log has, this one included.
        """
        self.attempt = self._num_before + 1
        self._write(
            "run",
            format=FORMAT,
            project=project,
            config=plain(dict(config or {})),
            world_size=world_size,
            device=device,
            versions=dict(versions or {}),
            attempt=self.attempt,
        )
        return self.attempt

    def reopen(self) -> None:
        """Go on after the `end` of the same process; in place of `run`, where the log has begun."""
        self.attempt = self._num_before
        self._write("reopened")

    def values(self, step: int | None, values: Mapping[str, Value]) -> None:
        """Append values of one step."""
        self._write("values", step=step, values=plain(dict(values)))

    def event(self, name: str, step: int | None = None, **details: Any) -> None:
        """Append something that happened."""
        self._write("event", step=step, event=name, details=plain(details))

    def medium(self, kind: str, name: str, step: int | None, file: str | Path) -> None:
        """Append where an "image", or an "artifact" (a file or folder), lies."""
        self._write(kind, step=step, name=name, file=Path(os.path.relpath(file, self.folder)).as_posix())

    def end(self, summary: Mapping[str, Any] | None = None) -> None:
        """Append that the run is over."""
        self._write("end", summary=plain(dict(summary or {})))

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        with self._lock:
            self._file.close()

    def _write(self, kind: str, **content: Any) -> None:
        if not self.attempt:
            raise StateError(f"a {kind!r} line came before the 'run' line of {self.path}; call run() first")
        text = json.dumps({"kind": kind, "time": time.time()} | content, ensure_ascii=False, separators=(",", ":"))
        # A lone surrogate (e.g. from a file name) has no UTF-8; its escape is JSON's own.
        line = text.encode("utf-8", "backslashreplace") + b"\n"
        with self._lock:
            if self._file.closed:
                raise StateError(f"{self.path} is closed: its run has ended")
            if self._is_torn:
                line = b"\n" + line
            rest = memoryview(line)
            while rest:
                self._is_torn = True
                rest = rest[self._file.write(rest) :]
            self._is_torn = False


def plain(value: Any, depth: int = 0) -> Any:
    """`value` as strict JSON has it: mappings, lists, numbers, texts; not-a-number as text.

    Of anything else the repr, cut to 200 characters; of a function the name, as the repr of a bound method holds its object's.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isnan(value):
            return "nan"
        return float(value) if math.isfinite(value) else "inf" if value > 0 else "-inf"
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # numpy's and torch's single numbers
        return plain(value.item(), _MAX_DEPTH)
    if depth < _MAX_DEPTH:
        if isinstance(value, Mapping):
            return {str(key): plain(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item, depth + 1) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, FunctionType | BuiltinFunctionType | MethodType):
        return f"{value.__module__}.{value.__qualname__}"
    text = repr(value)
    return text if len(text) <= _MAX_REPR else text[:_MAX_REPR] + "..."


def leaves(values: Mapping[Any, Any], separator: str = "/", prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of nested mappings, the names joined; an empty mapping is a value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, separator, f"{prefix}{name}{separator}")
        else:
            yield f"{prefix}{name}", value


def _remove_torn_line(path: Path) -> int:
    """Take a torn last line off, and count the process starts."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0
    head, newline, tail = data.rpartition(b"\n")
    lines = head.split(b"\n") if newline else []
    opening = b'{"kind":"run"'
    first = next((line for line in lines if line.strip()), tail)
    if first and _parse(first) is None and not (first is tail and opening.startswith(tail[: len(opening)])):
        raise TrackingError(_describe_other_file(path))
    if tail:
        if _parse(tail) is not None:
            with open(path, "ab", buffering=0) as file:
                file.write(b"\n")
            lines.append(tail)
        else:
            os.truncate(path, len(data) - len(tail))
    return sum(line.startswith(opening) for line in lines)


def _parse(line: bytes) -> dict[str, Any] | None:
    """The object that a line holds; None where it is torn or no line of a run's log."""
    try:
        entry = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
        return None
    moment, step = entry.get("time"), entry.get("step")
    is_timed = isinstance(moment, int | float) and not isinstance(moment, bool)
    return entry if is_timed and (step is None or type(step) is int) else None


def _describe_other_file(path: Path) -> str:
    return f"{path} is not a run log of Headway's: its first line is not a JSON object with 'kind' and 'time'; give another file"


# -------------------------------------------------------------------- read


@dataclass(frozen=True)
class LoggedEvent:
    """Something that happened.

    Attributes:
        name: "out_of_memory", "restart", "resumed", "checkpoint", ...
        step: the update it belongs to, or None.
        time: seconds since 1970.
        details: what else is known.
    """

    name: str
    step: int | None
    time: float
    details: dict[str, Any]


@dataclass(frozen=True)
class LoggedFile:
    """An image or another file that belongs to a run.

    Attributes:
        kind: "image" or "artifact".
        name: what it is called.
        step: the update it belongs to, or None.
        time: seconds since 1970.
        path: where it lies; nobody has looked whether it still does.
    """

    kind: str
    name: str
    step: int | None
    time: float
    path: Path


@dataclass(frozen=True)
class ProcessStart:
    """One process start of the run.

    Attributes:
        time: seconds since 1970.
        attempt: 1 for the first.
        is_after_end: the start before it had ended properly.
        last_time: of the line before it; nan: it is the first.
        last_step: of the values before it; None: there are none with steps.
        project: the run's name.
        config: what it was configured with.
        world_size: processes.
        device: its kind.
        versions: of packages.
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
    """What a run's log says.

    Attributes:
        path: the file.
        starts: one for each process start, in order.
        values: name to points (step, time, value) in the order logged, without those that are superseded.
        measured: the same of what the library measured itself: "memory" (bytes), "grad_norm".
        events: all of them, in order.
        media: images and artefacts, without those that are superseded.
        summary: of the last end; None where the run has not ended: it goes on, or was killed.
        last_time: of the last line.
        damaged: numbers of the lines that could not be read; a torn last one is not among them.
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
        """The configuration of the last start."""
        return self.starts[-1].config if self.starts else {}

    @property
    def project(self) -> str:
        """The run's name."""
        return self.starts[-1].project if self.starts else self.path.parent.name

    @property
    def is_ended(self) -> bool:
        """Did the last start end properly?"""
        return self.summary is not None


def read_run(path: str | Path) -> LoggedRun:
    """Read a run's log, also that of a run that is going on or was killed.

    Args:
        path: `log.jsonl` or the folder that holds it.

    Raises:
        TrackingError: there is none, it is something else, or a later version of Headway wrote it.
    """
    file = _locate(Path(path))
    lines = file.read_bytes().split(b"\n")
    run, reader = LoggedRun(file), None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        entry = _parse(line)
        if entry is None and reader is None and number < len(lines):
            raise TrackingError(_describe_other_file(file))
        if entry is None:
            if number < len(lines):
                run.damaged.append(number)
            continue
        reader = reader or _LogReader(run)
        try:
            reader.take(entry)
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


def _locate(path: Path) -> Path:
    file = path / FILE if path.is_dir() else path
    if file.is_file():
        return file
    if path.is_dir():
        others = sorted(each.parent.name for each in path.glob(f"*/{FILE}"))
        hint = f"give one of its folders: {', '.join(others)}" if others else "runs log where init_trackers was called"
        raise TrackingError(f"{path} holds no {FILE}; {hint}")
    raise TrackingError(f"{path} does not exist; give a run's folder or its {FILE}")


class _LogReader:
    """Takes lines in order; keeps with each point the era it came from, which a start or a step that is gone back to begins."""

    def __init__(self, run: LoggedRun) -> None:
        self.run = run
        self.points: dict[str, list[tuple[int, Point]]] = {}
        self.media: list[tuple[int, LoggedFile]] = []
        self.attempt = 0
        self.last_step: int | None = None
        # By era: the attempt, and the step that was gone back to at its beginning.
        self.eras: list[tuple[int, float]] = [(0, math.inf)]

    def take(self, entry: Mapping[str, Any]) -> None:
        moment, kind = float(entry["time"]), entry["kind"]
        if kind == "run":
            self._start(moment, entry)
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

    def _start(self, moment: float, entry: Mapping[str, Any]) -> None:
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
        """Drop what a later era has superseded."""
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
