"""The ranks' processes: their files, what these say of their end, and how they are ended.

Ending processes: the signals that end a launcher, and what ranks leave running when a run ends by a failure.

A signal still ends a launcher whose main thread does not hear it. Each rank leads a session of its own, and what it starts
(data-loading workers, programs) belongs to it, unless it leaves that on purpose (`setsid`).

Each rank's files: its output, the record of its exception and its pulse; and what they say of its end.

A folder in shared memory lives as long as the launcher's agent, so its contents outlive the workers. The agent holds a lock on it
(`flock`, which the kernel drops with its holder). An agent that was killed leaves its folder behind; the next one that starts on the
machine finds it without a holder, and removes it.
"""

import fcntl
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from subprocess import Popen
from typing import Any, Protocol

import psutil
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

from headway.common import env
from headway.launch.agent.records import RankExit, read_record
from headway.launch.plan import AgentOrder
from headway.launch.watch.hang_watch import progress
from headway.runtime import pulse

DEADLY = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

_DEAD = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)

_ROOT = Path("/dev/shm")
_PREFIX = "headway-memory-"

POLITE = 2.0
"""Seconds that what ranks left running gets to end in after SIGTERM."""


class Stoppable(Protocol):
    """The launcher's agent.

    Attributes:
        handed_on: the signal that the ranks answer by a checkpoint; None where there is none.
        code_when_stuck: the exit code, where the signal found that all ranks had ended well; else None.
    """

    handed_on: signal.Signals | None
    code_when_stuck: int | None

    def kill(self) -> None:
        """End the workers at once."""


def code_of(process: Popen[Any]) -> int | None:
    """The exit code of a process, read in a signal's handler, which may have come in the middle of `poll`."""
    if process.returncode is not None or not hasattr(os, "waitid"):
        return process.returncode
    try:
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0  # just now being looked at below this handler, which will say how it ended
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def ignore() -> None:
    """The run is over, and its exit code known: no signal changes it any more, nor while Python shuts down."""
    for number in DEADLY:
        signal.signal(number, signal.SIG_IGN)


def kill_when_stuck(agent: Stoppable, grace: float, usual: float, say: Callable[[str], None]) -> None:
    """End everything a while after the first signal, even where the main thread waits for a dead machine.

    Args:
        agent: ends the workers.
        grace: seconds that ranks get which save.
        usual: seconds that the others get.
        say: prints a line.
    """
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        # The thread holds the sender too, which would be closed with this function's end.
        while sender.fileno() >= 0 and receiver.recv(1)[0] not in DEADLY:
            pass
        began = time.monotonic()
        while time.monotonic() - began < (usual if agent.handed_on is None else grace):
            time.sleep(0.2)
        if agent.handed_on is not None:
            say(
                f"headway: the ranks have not saved within {grace:g} s of {agent.handed_on.name}; the last checkpoint stands"
            )
        agent.kill()
        code = agent.code_when_stuck
        os._exit(128 + (agent.handed_on or signal.SIGTERM) if code is None else code)

    threading.Thread(target=watch, name="kill-when-stuck", daemon=True).start()


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
    for process in psutil.process_iter(["status"]):
        with suppress(OSError):
            if os.getsid(process.pid) in wanted and process.info["status"] not in _DEAD:
                found.append(process.pid)
    return found


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


class SharedMemory:
    """Makes the folder, which only this user can enter.

    Args:
        root: where; a file system without a disk.

    Attributes:
        folder: its path; "" where the system has no shared memory.
    """

    def __init__(self, root: Path = _ROOT) -> None:
        self.folder, self._lock = "", -1
        with suppress(OSError):
            for left in root.glob(f"{_PREFIX}*"):
                _remove_left(left)
            while not self.folder:
                made = tempfile.mkdtemp(prefix=_PREFIX, dir=root)
                self._lock = os.open(made, os.O_RDONLY)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if os.path.isdir(made):  # else another agent has just taken it for one that was left
                    self.folder = made

    def remove(self) -> None:
        """The run is over: give the memory back."""
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)
            self.folder = ""


def _remove_left(folder: Path) -> None:
    """Remove a folder of this user's that no agent holds."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(handle).st_uid == os.getuid():
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(handle)


class RankFiles(LogsSpecs):
    """Where each rank's output and its record of an exception go: a folder per attempt, a file per rank."""

    def __init__(self, order: AgentOrder, scratch: Path, memory: SharedMemory) -> None:
        super().__init__(order.log_dir)
        self.memory = memory
        self._order = order
        self._scratch = scratch
        self.records: dict[int, Path] = {}
        self.pulses: dict[int, Path] = {}
        self.control = ""
        self._logs: dict[int, str] = {}

    @property
    def root_log_dir(self) -> str:
        """The folder of the log files, or where nothing stays."""
        return self._order.log_dir or str(self._scratch)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Name the files of one attempt, by local rank."""
        attempt = envs[0].get("TORCHELASTIC_RESTART_COUNT", "0")
        folder = Path(self.root_log_dir, "" if self._order.max_restarts == 0 else f"attempt{attempt}")
        folder.mkdir(parents=True, exist_ok=True)
        logs: dict[int, str] = {}
        self.records = {}
        for local_rank, variables in envs.items():
            logs[local_rank] = str(folder / f"rank{variables['RANK']}.log")
            record = self._scratch / f"rank{variables['RANK']}-attempt{attempt}.json"
            self.records[local_rank] = record
            variables["TORCHELASTIC_ERROR_FILE"] = str(record)
            variables.update(self._order.variables)
            variables[env.CONTROL] = self.control
            variables[env.MEMORY] = self.memory.folder
            self.pulses[local_rank] = record.with_suffix(".pulse")
            pulse.create(self.pulses[local_rank])
            variables[pulse.VARIABLE] = str(self.pulses[local_rank])
        screen = dict.fromkeys(envs, "")
        tee = self._order.tee
        stdouts = logs if tee in "13" and tee != "0" else screen
        # With "3" a worker sends its stderr where its stdout goes, so that one file holds both in order.
        stderrs = logs if tee == "2" else screen
        self._logs = logs if tee != "0" else {}
        return LogsDest(
            stdouts=stdouts,
            stderrs=stderrs,
            tee_stdouts=logs if stdouts is logs else {},
            tee_stderrs=logs if stderrs is logs else {},
            error_files={local_rank: str(path) for local_rank, path in self.records.items()},
        )

    def death(self, rank: int, local_rank: int, pid: int, code: int | None) -> RankExit | None:
        """How a rank ended, from what it left; None where it left nothing and has no exit code of a failure.

        A rank's log file then ends with its own traceback, which the screen shows once for all ranks.
        """
        path = self.records[local_rank]
        record, crash = read_record(path), Path(f"{path}.fault")
        has_crashed = code is not None and code < 0 and crash.exists()
        if record is None and not code:
            return None
        if record is not None and local_rank in self._logs:
            with open(self._logs[local_rank], "a") as log:
                log.write(record.trace)
        text, when = (crash.read_text(), crash.stat().st_mtime) if has_crashed else ("", 0.0)
        return RankExit(rank, socket.gethostname(), pid, code, record, text, when, progress(self.pulses[local_rank]))
