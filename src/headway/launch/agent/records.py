"""Record of the exception that ended a rank, which the rank writes and the launcher's agent reads."""

import json
import re
import signal
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headway.common import atomic
from headway.common.callsite import find_user_line
from headway.common.tracebacks import format_short_traceback, remove_backend_noise
from headway.log import is_debugging

# Messages of a rank that waited in a collective for a rank that is gone. They are a consequence, not a cause.
_PEER_LOSS_MESSAGE = re.compile(
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
    """Exception that ended a worker, as the worker recorded it in a file.

    Attributes:
        kind: Name of the exception's class.
        text: Message of the exception.
        line: Innermost line of user code, such as "train.py:12 in main". Empty if no frame belongs to user code.
        trace: Full traceback as text.
        at: Time of the failure in seconds since the epoch.
        shown: Shortened traceback for the screen. If empty, the full traceback is shown.
    """

    kind: str
    text: str
    line: str
    trace: str
    at: float
    shown: str = ""

    @property
    def is_consequence(self) -> bool:
        """Whether the exception only reports that another rank was lost or did not answer, according to its message."""
        return _PEER_LOSS_MESSAGE.search(self.text) is not None

    @property
    def is_lost_connection(self) -> bool:
        """Whether the exception is a communication library's message about a lost connection to another rank.

        Reports replace such a message with a clearer sentence.
        """
        return _LOST_CONNECTION.search(self.text) is not None


@dataclass(frozen=True)
class RankExit:
    """Description of how one rank ended.

    Attributes:
        rank: Global rank.
        host: Host name of the rank's machine.
        pid: Process ID.
        exit_code: Exit code; -n if signal n ended the rank. None if the agent ended the rank because the run was over.
        record: Exception that the rank recorded. None if it recorded none.
        crash: Python stack at a crash in C code. Empty if there was none.
        crashed_at: Time of the crash in seconds since the epoch.
        progress: Progress of training, such as "update 12, micro-step 1". Empty if the rank has not reported any.
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
        """Innermost line of user code at which the exception was raised. Empty if unknown."""
        return "" if self.record is None else self.record.line

    @property
    def sort_key(self) -> tuple[int, float, int]:
        """Sort key of failures, as a tuple (priority, time in seconds since the epoch, rank).

        Causes come before consequences, and earlier failures before later ones. Ranks that SIGKILL has ended come first.
        """
        killed, cause, plain_exit, consequence, ended = range(5)  # priorities
        code = self.exit_code
        if code == -signal.SIGKILL:
            return (killed, 0.0, self.rank)
        if self.record is not None and not self.record.is_consequence:
            return (cause, self.record.at, self.rank)
        if code is not None and code < 0:
            # A crash after a recorded exception happened during cleanup. A crash without a record is a cause.
            return (cause if self.record is None else consequence, self.crashed_at, self.rank)
        if self.record is None:
            return (plain_exit if code else ended, 0.0, self.rank)
        return (consequence, self.record.at, self.rank)

    @property
    def was_ended_by_agent(self) -> bool:
        """Whether the agent ended the rank because the run was over, before the rank recorded an exception."""
        return self.record is None and self.exit_code is None

    def describe(self) -> str:
        """Return a short description of how the rank ended."""
        if self.record is not None:
            lines = remove_backend_noise(self.record.text).splitlines()
            first_line = lines[0] if lines else ""
            return f"{self.record.kind}: {first_line}".rstrip(": ")
        if self.exit_code is None:
            return "ended by the launcher"
        if self.exit_code < 0:
            return f"ended by {_get_signal_name(-self.exit_code)}"
        return f"ended with exit code {self.exit_code}"


def write_record(path: Path, error: BaseException, note: str = "") -> bool:
    """Write the exception that ended this worker, in a format that torch's agent also reads.

    Args:
        path: File in which the agent looks for the record.
        error: Exception whose traceback starts at the user's first frame.
        note: Additional text, such as a list of the largest users of memory. Default: "".

    Returns:
        Whether the record could be written.
    """
    text = "".join(traceback.format_exception(error))
    text += f"{note}\n" if note and note not in text else ""
    now = time.time()
    shown = "" if is_debugging() else format_short_traceback(error)[0]
    shown += f"{note}\n" if shown and note and note not in shown else ""
    record = ExceptionRecord(type(error).__name__, str(error), find_user_line(error.__traceback__), text, now, shown)
    content = {
        "message": {
            "message": f"{record.kind}: {record.text}",
            "extraInfo": {"py_callstack": text, "timestamp": str(int(now))},
        },
        "headway": asdict(record),
    }
    try:
        atomic.write_text(path, json.dumps(content))  # atomic, because the agent can read it at any time
    except OSError:
        return False
    return True


def read_record(path: Path) -> ExceptionRecord | None:
    """Read a worker's exception record, written by Headway or by torch's `@record`.

    Return None if the file does not exist, cannot be read, or has neither format.

    Args:
        path: File of the record.
    """
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


def _get_signal_name(number: int) -> str:
    """Return the name of a signal, such as "SIGKILL", or "signal N" if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
