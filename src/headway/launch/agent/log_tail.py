"""Latest values of a run's log, read incrementally while the run writes it."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

_SKIP_EVENTS = {"skipped_update", "non_finite", "spike"}
"""Events that report a skipped update, unless their action is "none" or "raise"."""

_BLOCK_BYTES = 1 << 20
"""Maximum number of bytes of the log that are read at once."""


class LogTail:
    """Incremental reader of a run's log of values and events (JSON lines).

    The log can grow, be replaced, or have an incomplete last line.

    Attributes:
        path: File of the log. Empty before the first read.
        values: Latest number logged under each name.
        events: Number of events by name.
        num_skipped: Number of optimizer updates that the run has skipped.
        commit: Pair of (time in seconds since the epoch, number of updates) of the latest checkpoint. None before the
            first.
    """

    def __init__(self) -> None:
        self._start_over("", 0)

    def _start_over(self, path: str, inode: int) -> None:
        """Discard all values, and read the given file from its beginning at the next read.

        Args:
            path: File of the log.
            inode: Number that identifies the file, so that a replacement under the same path is noticed. 0: no file.
        """
        self.path = path
        self._inode = inode
        self._offset = 0  # number of bytes read
        self._incomplete_line = b""  # last line read, if its end was not written yet
        self.values: dict[str, float] = {}
        self.events: Counter[str] = Counter()
        self.num_skipped = 0
        self.commit: tuple[float, int] | None = None

    def read_new_lines(self, path: str) -> None:
        """Read the lines added since the last call. Read all lines if this is another file, or has shrunk.

        Do nothing if the log does not exist.

        Args:
            path: File of the log. If empty, all values that were read before are discarded.
        """
        if not path:
            self._start_over("", 0)
            return
        try:
            status = os.stat(path)
            is_other_file = (path, status.st_ino) != (self.path, self._inode)
            if is_other_file or status.st_size < self._offset:
                self._start_over(path, status.st_ino)
            if status.st_size == self._offset:
                return
            with open(path, "rb") as file:
                file.seek(self._offset)
                while block := file.read(_BLOCK_BYTES):
                    self._offset += len(block)
                    *lines, self._incomplete_line = (self._incomplete_line + block).split(b"\n")
                    for line in lines:
                        self._record_line(line)
        except OSError:
            return

    def _record_line(self, line: bytes) -> None:
        """Record the values or the event in a line of the log. Ignore lines that have another format."""
        try:
            entry = json.loads(line)
            kind, timestamp, step = entry["kind"], float(entry["time"]), entry.get("step")
            if kind == "values":
                self.values.update(_iterate_numbers(entry["values"]))
            elif kind == "event":
                name, details = str(entry["event"]), entry.get("details") or {}
                self.events[name] += 1
                if name in _SKIP_EVENTS and details.get("action") not in ("none", "raise"):
                    self.num_skipped += 1
                if name == "checkpoint":
                    self.commit = timestamp, step if isinstance(step, int) else 0
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return  # an incomplete line, or a line of another program


def _iterate_numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (name, number) for each logged value that is a number. JSON has no NaN and inf, so they are logged as text."""
    for name, value in values.items():
        if isinstance(value, int | float) or value in ("nan", "inf", "-inf"):
            yield name, float(value)
