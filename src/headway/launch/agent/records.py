"""What a rank leaves when it ends: the record of its exception, or of the checkpoint that it was asked for."""

import json
import re
import signal
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headway.common import atomic
from headway.common.callsite import plain, shorten, users_line
from headway.errors import PREEMPTED
from headway.log import is_debugging

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
class ExceptionRecord:
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
class RankExit:
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
    record: ExceptionRecord | None = None
    crash: str = ""
    crashed_at: float = 0.0
    progress: str = ""

    @property
    def line(self) -> str:
        """The user's line at which it raised; empty where nobody knows."""
        return "" if self.record is None else self.record.line

    @property
    def weight(self) -> tuple[int, float, int]:
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
class PreemptedRun:
    """What a rank leaves for the launcher before it ends.

    Attributes:
        reason: who asked, and how.
        update: updates that have happened.
        checkpoint: the folder that was committed.
    """

    reason: str
    update: int
    checkpoint: str

    @property
    def exit_code(self) -> int:
        """PREEMPTED."""
        return PREEMPTED

    def text(self) -> str:
        """What the screen shows."""
        return (
            f"headway: preempted by {self.reason} after update {self.update}; checkpoint {self.checkpoint}\n"
            f"headway: exit code {PREEMPTED}: start the same command again, and it goes on from there"
        )

    def leave(self, record: str | Path) -> None:
        """Write it beside the file that is this rank's record of an exception; a launcher reads it there."""
        atomic.write_text(_beside(record), json.dumps(asdict(self)))


def find_preempted(record: str | Path) -> PreemptedRun | None:
    """What the rank with this record has left; None where it has left nothing."""
    try:
        return PreemptedRun(**json.loads(_beside(record).read_text()))
    except FileNotFoundError:
        return None


def _beside(record: str | Path) -> Path:
    return Path(f"{record}.preempted")


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
    record = ExceptionRecord(type(error).__name__, str(error), users_line(error.__traceback__), text, now, shown)
    content = {
        "message": {
            "message": f"{record.kind}: {record.text}",
            "extraInfo": {"py_callstack": text, "timestamp": str(int(now))},
        },
        "headway": asdict(record),
    }
    try:
        atomic.write_text(path, json.dumps(content))  # whole or not at all: the agent may read at any time
    except OSError:
        return False
    return True


def read_record(path: Path) -> ExceptionRecord | None:
    """Read a worker's record, Headway's or that of torch's own `@record`; None where none can be read."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if isinstance(content.get("headway"), dict):
        return ExceptionRecord(**content["headway"])
    message = content.get("message")
    if not isinstance(message, dict):
        return None
    kind, _, text = str(message.get("message", "")).partition(": ")
    extra = message.get("extraInfo", {})
    return ExceptionRecord(kind, text, "", str(extra.get("py_callstack", "")), float(extra.get("timestamp", 0)))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
