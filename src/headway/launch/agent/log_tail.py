"""Latest values of a run's log, read incrementally while the run writes it."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

_SKIPPING = {"skipped_update", "non_finite", "spike"}

_BLOCK = 1 << 20


class LogTail:
    """Incremental reader of a run's log of values and events (JSON lines).

    The log can grow, be replaced, or have an incomplete last line.

    Attributes:
        values: Latest number logged under each name.
        events: Number of events by name.
        num_skipped: Number of optimizer updates that the run has skipped.
        commit: Pair of (time in seconds since the epoch, number of updates) of the latest checkpoint. None before the
            first.
    """

    def __init__(self) -> None:
        self._start_over("", 0)

    def _start_over(self, path: str, inode: int) -> None:
        self._path = path
        self._inode = inode
        self._offset = 0
        self._rest = b""
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
        try:
            status = os.stat(path) if path else None
            size, inode = (status.st_size, status.st_ino) if status is not None else (0, 0)
            if (path, inode) != (self._path, self._inode) or size < self._offset:
                self._start_over(path, inode)
            if size <= self._offset:
                return
            with open(path, "rb") as file:
                file.seek(self._offset)
                while block := file.read(_BLOCK):
                    self._offset += len(block)
                    *lines, self._rest = (self._rest + block).split(b"\n")
                    for line in lines:
                        self._take_line(line)
        except OSError:
            return

    def _take_line(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            kind, when, step = entry["kind"], float(entry["time"]), entry.get("step")
            if kind == "values":
                self.values.update(_select_numbers(entry["values"]))
            elif kind == "event":
                name, details = str(entry["event"]), entry.get("details") or {}
                self.events[name] += 1
                self.num_skipped += name in _SKIPPING and details.get("action") not in ("none", "raise")
                if name == "checkpoint":
                    self.commit = when, step if isinstance(step, int) else 0
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return  # an incomplete line, or a line of another program


def _select_numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, int | float) or value in ("nan", "inf", "-inf"):
            yield name, float(value)
