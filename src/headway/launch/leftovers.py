"""What ranks leave running when a run ends by a failure: stopped data-loading workers, programs that a rank started.

Each rank leads a session of its own, and what it starts belongs to it, unless it leaves that on purpose (`setsid`). Torch-free.
"""

import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

POLITE = 2.0
"""Seconds to end in after SIGTERM."""


def end_sessions(leaders: Iterable[int], seconds: float = POLITE) -> list[int]:
    """End the processes in the sessions of these ranks, which have ended themselves; returns those that had to be killed.

    Args:
        leaders: process ids of the ranks.
        seconds: how long they get after SIGTERM.
    """
    wanted = set(leaders)
    if sys.platform != "linux":
        for leader in wanted:
            with suppress(OSError):
                os.killpg(leader, signal.SIGKILL)
        return []
    left = members(wanted)
    for pid in left:
        for number in (signal.SIGTERM, signal.SIGCONT):  # one that is stopped hears nothing before it goes on
            _send(pid, number)
    deadline = time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = members(wanted)
    for pid in left:
        _send(pid, signal.SIGKILL)
    return left


def members(leaders: Iterable[int]) -> list[int]:
    """The live processes in the sessions that these lead."""
    wanted, found = set(leaders), []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            # State, parent, process group and session follow the name, which may hold anything.
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
            if fields[0] not in "ZX" and int(fields[3]) in wanted:
                found.append(int(path.parent.name))
    return found


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
