"""Run log: a file with one JSON object per line, which remains readable if the process is killed.

The file is `<logging_dir>/<project_name>/log.jsonl`. Only rank 0 writes it. Every line has "kind" and "time" (seconds
since 1970):

=========  =====================================================================================================
run        a process start: format, project, config, world_size, device, versions, attempt (1, 2, ...)
values     step (or null) and values: name to number or text; not-a-number and the infinities are the texts "nan",
           "inf" and "-inf", so that each line is strict JSON, and are read back as floats
           names that begin with "headway/" are those of values that the library measures itself
event      event, step (or null) and details: "resumed", "checkpoint", "out_of_memory", ...
image      name, step, file (relative to the folder)
artifact   name, step, file (relative to the folder)
end        summary
reopened   the process that wrote "end" writes more, such as an evaluation after the training; another "end" follows
=========  =====================================================================================================

A line is a single write, so a kill damages the last line at most. The next start removes an incomplete line before
it appends. After "resumed" (or "started_over") with a step N, earlier lines with values of later steps are
superseded, and the reader drops them. If two starts logged one name for one step, the later value counts.
"""

import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

from headway.errors import StateError, TrackingError

FILE = "log.jsonl"
"""Name of a run log's file."""
FORMAT = 1
"""Version of the format, which each "run" line contains."""
MEASURED = "headway/"
"""Prefix for names of values that the library measures itself."""
SUPERSEDING = frozenset({"resumed", "started_over"})
"""Kinds of events after which earlier values of later steps are superseded."""
RUN_LINE_START = b'{"kind":"run"'
"""First bytes of each "run" line, and therefore of each run log."""
_MAX_DEPTH = 50
"""Levels of nesting up to which `convert_to_json` converts the values of mappings and lists."""
_MAX_REPR = 200
"""Number of characters after which `convert_to_json` truncates a repr."""

Value = float | int | bool | str
"""Logged number or text."""


class Point(NamedTuple):
    """Value that was logged once.

    Attributes:
        step: Step of the run. None if none was logged.
        time: Time in seconds since 1970.
        value: Number or text.
    """

    step: int | None
    time: float
    value: Value


class RunLog:
    """Writer of a run log.

    Each process start writes a "run" line, and then its values and events. Several threads may share one writer. All
    methods that write raise `StateError` before `write_start` or `reopen`, and after `close`.

    Args:
        folder: Folder of the run, created if missing. An existing log is continued.

    Attributes:
        folder: Folder of the run.
        path: Path of the log file.
        attempt: Number of this process start in the log, from 1; 0 before `write_start` is called.

    Raises:
        TrackingError: If the folder contains a `log.jsonl` that is not a run log.
        OSError: If the log cannot be written.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / FILE
        self._lock = threading.Lock()  # for the file, which several threads write to
        self._ends_in_partial_line = False  # whether a failed write has left an incomplete line
        self.attempt = 0
        self._num_earlier_starts = _remove_partial_line(self.path)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115  (closed by close())

    def write_start(
        self,
        project: str,
        config: Mapping[str, Any] | None = None,
        *,
        world_size: int = 1,
        device: str = "cpu",
        versions: Mapping[str, str] | None = None,
    ) -> int:
        """Write the "run" line, which must be the first line of this process.

        Args:
            project: Name of the run.
            config: Configuration of the run. Values that JSON cannot represent are written as their repr. Default:
                empty.
            world_size: Number of processes.
            device: Type of device.
            versions: Versions of packages, by their names. Default: none.

        Returns:
            Number of process starts in the log, including this one.
        """
        self.attempt = self._num_earlier_starts + 1
        self._write_entry(
            "run",
            format=FORMAT,
            project=project,
            config=convert_to_json(dict(config or {})),
            world_size=world_size,
            device=device,
            versions=dict(versions or {}),
            attempt=self.attempt,
        )
        return self.attempt

    def reopen(self) -> None:
        """Continue a log that an earlier `RunLog` of this process has ended.

        Call it instead of `write_start`.
        """
        self.attempt = self._num_earlier_starts
        self._write_entry("reopened")

    def write_values(self, step: int | None, values: Mapping[str, Value]) -> None:
        """Append the values of one step.

        Args:
            step: Step of the run, or None.
            values: Values by name.
        """
        self._write_entry("values", step=step, values=convert_to_json(dict(values)))

    def write_event(self, name: str, step: int | None = None, /, **details: Any) -> None:
        """Append a run event.

        Args:
            name: Kind of event.
            step: Number of optimizer updates at which the event occurred, or None.
            details: Details of the event. They may be called "name" and "step", too.
        """
        self._write_entry("event", step=step, event=name, details=convert_to_json(details))

    def write_medium(self, kind: str, name: str, step: int | None, file: str | Path) -> None:
        """Append the path of an image or an artifact (a file or folder).

        Args:
            kind: "image" or "artifact".
            name: Name of the image or artifact.
            step: Step of the run, or None.
            file: Path, which is stored relative to the run's folder.
        """
        self._write_entry(kind, step=step, name=name, file=Path(os.path.relpath(file, self.folder)).as_posix())

    def write_end(self, summary: Mapping[str, Any] | None = None) -> None:
        """Append the "end" line.

        Args:
            summary: Final values of the run. Default: none.
        """
        self._write_entry("end", summary=convert_to_json(dict(summary or {})))

    def close(self) -> None:
        """Close the file. A second call has no effect."""
        with self._lock:
            self._file.close()

    def _write_entry(self, kind: str, **content: Any) -> None:
        """Append one line to the log. It is written completely before a line of another thread.

        Args:
            kind: Kind of the line, such as "values".
            **content: Other fields of the line.

        Raises:
            StateError: If `write_start` has not been called, or the log is closed.
        """
        if not self.attempt:
            raise StateError(
                f"a {kind!r} line cannot be written before the 'run' line of {self.path}. Call write_start() first"
            )
        text = json.dumps({"kind": kind, "time": time.time()} | content, ensure_ascii=False, separators=(",", ":"))
        # A lone surrogate (e.g. from a file name) has no UTF-8 form; its escape is valid JSON.
        line = text.encode("utf-8", "backslashreplace") + b"\n"
        with self._lock:
            if self._file.closed:
                raise StateError(f"{self.path} is closed: its run has ended")
            if self._ends_in_partial_line:
                line = b"\n" + line
            unwritten = memoryview(line)
            while unwritten:
                self._ends_in_partial_line = True
                unwritten = unwritten[self._file.write(unwritten) :]
            self._ends_in_partial_line = False


def convert_to_json(value: Any, depth: int = 0) -> Any:
    """Convert a value to one that strict JSON can represent.

    Mappings, lists and tuples are converted recursively, to a depth of 50 levels. Scalar tensors and arrays become
    numbers. NaN, infinities and paths become strings. Functions become their qualified name. Any other object
    becomes its repr, truncated to 200 characters.

    Args:
        value: Any value.
        depth: Current nesting depth, for the recursion.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        if math.isnan(value):
            return "nan"
        return "inf" if value > 0 else "-inf"
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # NumPy scalars and 0-d tensors
        return convert_to_json(value.item(), _MAX_DEPTH)
    if depth < _MAX_DEPTH:
        if isinstance(value, Mapping):
            return {str(key): convert_to_json(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [convert_to_json(item, depth + 1) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, FunctionType | BuiltinFunctionType | MethodType):
        return f"{value.__module__}.{value.__qualname__}"
    text = repr(value)
    return text if len(text) <= _MAX_REPR else text[:_MAX_REPR] + "..."


def list_leaves(values: Mapping[Any, Any], separator: str = "/", prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield pairs of (name, value) for the leaves of nested mappings.

    A leaf's name consists of the keys on the way to it, joined with `separator`. An empty mapping is a leaf.

    Args:
        values: Nested mappings.
        separator: Text between the parts of a name.
        prefix: Start of every name, for the recursion.
    """
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from list_leaves(value, separator, f"{prefix}{name}{separator}")
        else:
            yield f"{prefix}{name}", value


def _remove_partial_line(path: Path) -> int:
    """Remove a run log's last line if a kill has left it incomplete. Return the number of process starts in the log.

    Raises:
        TrackingError: If the file is not a run log.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0
    head, newline, last_line = data.rpartition(b"\n")
    lines = head.split(b"\n") if newline else []
    first_line = next((line for line in lines if line.strip()), None)
    if first_line is not None:
        is_run_log = parse_line(first_line) is not None
    else:  # the file contains at most one line, which may be the start of a "run" line
        is_start = RUN_LINE_START.startswith(last_line[: len(RUN_LINE_START)])
        is_run_log = is_start or parse_line(last_line) is not None
    if not is_run_log:
        raise TrackingError(describe_other_file(path))
    if last_line:
        if parse_line(last_line) is not None:  # only the end of the line is missing
            with open(path, "ab", buffering=0) as file:
                file.write(b"\n")
            lines.append(last_line)
        else:
            os.truncate(path, len(data) - len(last_line))
    return sum(line.startswith(RUN_LINE_START) for line in lines)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line; None if the line is incomplete or does not belong to a run log."""
    try:
        entry = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
        return None
    moment, step = entry.get("time"), entry.get("step")
    has_time = isinstance(moment, int | float) and not isinstance(moment, bool)
    return entry if has_time and (step is None or type(step) is int) else None


def describe_other_file(path: Path) -> str:
    """Return the error message for a file that is not a run log."""
    return f"{path} is not a run log of Headway's: its first line is not a JSON object with 'kind' and 'time'; give another file"
