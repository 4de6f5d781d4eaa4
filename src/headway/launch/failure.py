"""First failure first: what ended a run, on which rank, at which line, told once; failure.json for machines."""

import json
import os
import re
import signal
import sysconfig
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from headway.launch.control_group import control_groups
from headway.log import is_debugging
from headway.traces import plain, shorten
from headway.units import format_bytes

# What a rank says when another one has left it alone in a collective: a consequence, not a cause.
_LEFT_ALONE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|peer closed|connectFullMesh|remote process has terminated"
    r"|socket (error|closed)|ncclRemoteError|Timed out waiting|timed out after|Stop_waiting|recvValue failed"
    r"|vote \d+ missed|which hosted the control plane",
    re.IGNORECASE,
)

_LOST_CONNECTION = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|peer closed|remote process has terminated|socket (error|closed)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Record:
    """What a worker wrote about the exception that ended it.

    Attributes:
        kind: the exception's class.
        text: its message.
        line: the user's line, "train.py:12 in main"; empty where no frame is the user's.
        trace: the whole traceback as text.
        at: when, in seconds since the epoch.
        shown: the traceback as the screen shows it; empty: as it is.
    """

    kind: str
    text: str
    line: str
    trace: str
    at: float
    shown: str = ""

    @property
    def is_consequence(self) -> bool:
        """Does it only say that another rank was lost?"""
        return _LEFT_ALONE.search(self.text) is not None

    @property
    def is_lost_connection(self) -> bool:
        """Is it an engine's word for another rank's end, which a sentence of ours says better?"""
        return _LOST_CONNECTION.search(self.text) is not None


@dataclass(frozen=True)
class Death:
    """How one rank ended.

    Attributes:
        exit_code: its exit code; -n where signal n ended it; None where the agent ended it itself, as the run was over.
        record: what it wrote before, if anything.
        crash: the Python stack at a crash in C code, if any.
        crashed_at: when that was.
        progress: how far training had come there, "update 12, micro-step 1"; empty where nobody said.
    """

    rank: int
    host: str
    pid: int
    exit_code: int | None
    record: Record | None = None
    crash: str = ""
    crashed_at: float = 0.0
    progress: str = ""

    @property
    def _weight(self) -> tuple[int, float, int]:
        """Causes before consequences, the earlier before the later."""
        code = self.exit_code
        if code == -signal.SIGKILL:
            return (0, 0.0, self.rank)
        if self.record is not None and not self.record.is_consequence:
            return (1, self.record.at, self.rank)
        if code is not None and code < 0:
            # A crash after a record is the cleaning up; one without was the beginning.
            return (1 if self.record is None else 3, self.crashed_at, self.rank)
        if self.record is None:
            return (2 if code else 4, 0.0, self.rank)
        return (3, self.record.at, self.rank)

    def what(self) -> str:
        """The end in half a line."""
        if self.record is not None:
            return f"{self.record.kind}: {(plain(self.record.text).splitlines() or [''])[0]}".rstrip(": ")
        if self.exit_code is None:
            return "ended by the launcher"
        if self.exit_code < 0:
            return f"ended by {_signal_name(-self.exit_code)}"
        return f"ended with exit code {self.exit_code}"


@dataclass(frozen=True)
class Report:
    """What ended an attempt.

    Attributes:
        deaths: the ranks of this machine that failed or left a record.
        world_size: processes over all machines.
        memory: what the kernel's counters say about the out-of-memory killer; empty where they say nothing.
        finished: the ranks of this machine that had come to the end of their script.
        is_told_by_rank_0: does the agent of rank 0 tell all of it, on the screen that this one writes to as well?
    """

    deaths: tuple[Death, ...]
    world_size: int
    memory: str = ""
    finished: tuple[int, ...] = ()
    is_told_by_rank_0: bool = False

    @property
    def first(self) -> Death:
        """The one that everything else follows from."""
        return min(self.deaths, key=lambda death: death._weight)

    @property
    def exit_code(self) -> int:
        """The exit code of the run: the first failure's, 128 + n where signal n ended it."""
        code = self.first.exit_code or 1
        return code if code > 0 else 128 - code

    def text(self) -> str:
        """The report as people read it."""
        first = self.first
        where = f", at {first.record.line}" if first.record is not None and first.record.line else ""
        if self.is_told_by_rank_0:
            return f"headway: rank {first.rank} on host {first.host} failed first{where}; its report is with rank 0's output"
        which = f"host {first.host}, pid {first.pid}" + (f", {first.progress}" if first.progress else "")
        lines = [f"headway: rank {first.rank} of {self.world_size} failed first{where} ({which})"]
        if first.record is not None:
            lines.append((first.record.shown or plain(first.record.trace)).rstrip())
        else:
            lines.append(f"headway: rank {first.rank} was {first.what()}{self._why(first)}")
            if first.crash:
                lines.append(first.crash.rstrip())
        lines += self._others(first)
        if self.finished and first.record is not None and first.record.is_consequence:
            who = f"rank{'s' if len(self.finished) > 1 else ''} {_ranges(list(self.finished))}"
            lines.insert(1, f"headway: {who} had finished the script by then, so the others waited in vain: give all ranks "
                            "the same number of steps and collectives")  # fmt: skip
        return "\n".join(lines)

    def _why(self, death: Death) -> str:
        if death.exit_code == -signal.SIGKILL:
            return f": {self.memory}" if self.memory else (
                "; nothing in the kernel's counters says that memory ran out, so a person, "
                "a scheduler or a container's limit sent it"
            )  # fmt: skip
        if death.exit_code == -signal.SIGTERM:
            return ", which somebody outside of this run sent"
        return ""

    def _others(self, first: Death) -> list[str]:
        others = sorted((death for death in self.deaths if death is not first), key=lambda death: death.rank)
        alike = [death.rank for death in others if _is_alike(death, first)]
        later = [
            one for one in others if one.rank not in alike and (one.record is not None or one.exit_code is not None)
        ]
        lines = []
        if alike:
            lines.append(f"headway: the same on rank{'s' if len(alike) > 1 else ''} {_ranges(alike)}")
        lines += consequences(later, self.world_size, first.rank)
        num_ended = self.world_size - len(alike) - len(self.finished) - 1 - len(later)
        if num_ended > 0:
            have = "processes have" if num_ended > 1 else "process has"
            lines.append(f"headway: the other {num_ended} {have} been ended")
        return lines

    def write(self, path: Path) -> None:
        """Write failure.json: the first failure, and every rank's."""
        content = {
            "world_size": self.world_size,
            "exit_code": self.exit_code,
            "memory": self.memory,
            "first": asdict(self.first),
            "ranks": [asdict(death) for death in self.deaths],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".tmp")
        scratch.write_text(json.dumps(content, indent=2) + "\n")
        scratch.replace(path)


def consequences(deaths: Sequence[Death], world_size: int, first: int | None = None) -> list[str]:
    """What ranks said after the first failure, or after a machine was lost: a plain line each, the same line once.

    Args:
        world_size: of the run; with two ranks it is clear which connection was lost.
        first: the rank that failed first; None where a machine was lost.
    """
    lost: dict[str, list[int]] = {}
    lines: dict[int, str] = {}
    for death in sorted(deaths, key=lambda one: one.rank):
        where = f" ({death.record.line})" if death.record is not None and death.record.line else ""
        if death.record is not None and death.record.is_lost_connection:
            lost.setdefault(where, []).append(death.rank)
        else:
            lines[death.rank] = f"headway: then rank {death.rank}: {death.what()}{where}"
    for where, ranks in lost.items():
        other = f"rank {first}" if world_size == 2 and first is not None else "the others"
        who, its = ("ranks", "their") if len(ranks) > 1 else ("rank", "its")
        lines[ranks[0]] = f"headway: {who} {_ranges(ranks)} then lost {its} connection to {other}{where}"
    return [lines[rank] for rank in sorted(lines)]


def _is_alike(one: Death, other: Death) -> bool:
    if one.record is None or other.record is None:
        return one.record is other.record and one.exit_code == other.exit_code and one.exit_code is not None
    return (one.record.kind, one.record.line) == (
        other.record.kind,
        other.record.line,
    ) and not one.record.is_consequence


def _ranges(ranks: list[int]) -> str:
    """[0, 1, 2, 5] -> '0-2, 5'."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def write_record(path: Path, error: BaseException, note: str = "") -> bool:
    """Write what ended this worker, in a form that torch's agent reads too.

    Args:
        path: where the agent looks for it.
        error: the exception, with its traceback from the user's first frame on.
        note: what more there is to say, such as what held the memory that ran out.

    Returns:
        Whether it could be written.
    """
    text = "".join(traceback.format_exception(error))
    text += f"{note}\n" if note and note not in text else ""
    now = time.time()
    shown = "" if is_debugging() else shorten(error)[0]
    shown += f"{note}\n" if shown and note and note not in shown else ""
    record = Record(type(error).__name__, str(error), user_line(error.__traceback__), text, now, shown)
    content = {
        "message": {
            "message": f"{record.kind}: {record.text}",
            "extraInfo": {"py_callstack": text, "timestamp": str(int(now))},
        },
        "headway": asdict(record),
    }
    try:
        scratch = path.with_suffix(".tmp")
        scratch.write_text(json.dumps(content))
        scratch.replace(path)
    except OSError:
        return False
    return True


def read_record(path: Path) -> Record | None:
    """Read a worker's record, Headway's or that of torch's own `@record`; None where none can be read."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if isinstance(content.get("headway"), dict):
        return Record(**content["headway"])
    message = content.get("message")
    if not isinstance(message, dict):
        return None
    kind, _, text = str(message.get("message", "")).partition(": ")
    extra = message.get("extraInfo", {})
    return Record(kind, text, "", str(extra.get("py_callstack", "")), float(extra.get("timestamp", 0)))


def user_line(trace: TracebackType | None) -> str:
    """The innermost line that is neither an installed package's nor Python's own: "train.py:12 in main"."""
    libraries = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    libraries.add(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    found = ""
    for frame in traceback.extract_tb(trace):
        if frame.filename.startswith("<") or any(frame.filename.startswith(library + os.sep) for library in libraries):
            continue
        name = os.path.relpath(frame.filename) if frame.filename.startswith(os.getcwd() + os.sep) else frame.filename
        found = f"{name}:{frame.lineno}" + ("" if frame.name == "<module>" else f" in {frame.name}")
    return found


class MemoryWatch:
    """The kernel's out-of-memory counters, read before and after."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._group = next((group for group in control_groups(root) if group.num_kills is not None), None)
        self._before = self._num_kills()

    def verdict(self) -> str:
        """What the counters say since this object was made; empty where they say nothing."""
        kills = self._num_kills() - self._before
        if kills <= 0:
            return ""
        text = "the kernel's out-of-memory killer sent it, as the host's memory ran out"
        peak, limit = (None, None) if self._group is None else (self._group.peak, self._group.limit)
        if peak is not None and limit is not None:
            text += f" (this container's peak: {format_bytes(peak)} of {format_bytes(limit)})"
        elif peak is not None:
            text += f" (peak: {format_bytes(peak)})"
        return text + "; use fewer processes or data-loading workers, or a smaller batch"

    def _num_kills(self) -> int:
        try:
            counters = (self._root / "proc/vmstat").read_text()
        except OSError:
            counters = ""
        on_the_host = re.search(r"^oom_kill (\d+)", counters, re.MULTILINE)
        in_the_group = None if self._group is None else self._group.num_kills
        return max(int(on_the_host[1]) if on_the_host else 0, in_the_group or 0)
