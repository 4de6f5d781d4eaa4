"""Lock that lets only one run write to a checkpoint directory, with a record of its owner.

A process that finds a lock asks the kernel whether the owner is alive. This works only if the owner was started on the
same machine, and the machine has not been restarted since. Otherwise the process waits to see whether the lock's
modification time changes. A living owner touches the lock every few seconds. An owner that does not do this counts as
dead. Reading a checkpoint needs no lock.

`stores.folder_lock` implements the lock as a file on a disk. In an object store, the lock is an object that is created
and changed only by conditional requests (`headway.integrations.object_store.lock`).
"""

import json
import os
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.common.untrusted import escape_text
from headway.log import get_logger

log = get_logger(__name__)

BEAT = 5.0
"""Time in seconds between two touches of a lock by its owner."""
SILENCE = 30.0
"""Time in seconds without a touch, after which the owner of a lock counts as dead."""
IN_USE = "is in use by another run"
TAKEN = "was taken by another run while this one did not respond"
"""Parts of error messages: why a directory cannot be locked (`IN_USE`), or is no longer locked (`TAKEN`)."""


@dataclass(frozen=True)
class LockOwner:
    """Process that holds the lock of a checkpoint directory.

    Attributes:
        run: ID of the run. A resumed run keeps it.
        start: ID of this launch of the run. It is the same on all machines. Each resume has a new one.
        script: Name of the script that the process runs.
        host: Host name.
        machine: Boot ID plus PID namespace, which identify a machine. "" if unknown.
        pid: Process ID in the PID namespace of `machine`.
        born: Start time of the process in the kernel's clock ticks.
        since: UTC time at which the process took the lock.
    """

    run: str
    start: str
    script: str
    host: str
    machine: str
    pid: int
    born: str
    since: str

    def __str__(self) -> str:
        return escape_text(f"run {self.run} ({self.script}, process {self.pid} on {self.host}, since {self.since})")

    @classmethod
    def describe_this_process(cls, run: str, start: str) -> "LockOwner":
        """Return a `LockOwner` that describes this process.

        Args:
            run: ID of the run.
            start: ID of this launch of the run.
        """
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        script = os.path.basename(sys.argv[0] or "python")
        return cls(
            run=run,
            start=start,
            script=script,
            host=socket.gethostname(),
            machine=_get_machine_id(),
            pid=os.getpid(),
            born=_read_start_time(os.getpid()),
            since=now,
        )

    @property
    def is_this_process(self) -> bool:
        """Whether the owner is this process."""
        own = LockOwner.describe_this_process(self.run, self.start)
        return (self.host, self.machine, self.pid, self.born) == (own.host, own.machine, own.pid, own.born)

    @property
    def is_alive(self) -> bool | None:
        """Whether the owner's process is alive. None if the process might run on another machine.

        If the value is None, only changes of the lock's modification time or content show that the owner is alive.
        """
        if not self.machine or self.machine != _get_machine_id():
            return None
        return _read_start_time(self.pid) == self.born


class CheckpointLock(ABC):
    """Base class of the locks of a checkpoint directory. A lock is a file or an object next to the directory.

    The constructor takes the lock. If the owner of an existing lock might be on another machine, the constructor waits
    up to `SILENCE` seconds to see whether the owner is alive.

    Args:
        folder: Directory to lock.
        run: ID of the run, as in `LockOwner`.
        start: ID of this launch of the run, as in `LockOwner`.

    Raises:
        CheckpointError: If another run holds the lock.
        OSError: If the lock file cannot be created, for example because the disk is full.
    """

    _path: Any

    def __init__(self, folder: Path, run: str, start: str) -> None:
        self.start = start
        self._run = run
        self._folder = folder
        self._path = folder.with_name(f"{folder.name}.lock")
        self._pid = os.getpid()
        self._end = threading.Event()
        """Set when this process no longer holds the lock, which ends the thread that touches it."""
        self._create_lock()

    @abstractmethod
    def check(self) -> None:
        """Raise `CheckpointError` if another run has taken the lock.

        Raises:
            CheckpointError: If another run has taken the lock, because this run did not touch it for too long.
        """

    def release(self) -> None:
        """Release the lock, so that other runs can take it.

        Do nothing in a forked child process, or if the lock has already been released.
        """
        if os.getpid() == self._pid and not self._end.is_set():
            self._end.set()
            self._remove_lock()

    @abstractmethod
    def _create_lock(self) -> None:
        """Create the lock file or object. The lock of a dead process is replaced.

        If another machine of this run has already created it, nothing is written.

        Raises:
            CheckpointError: If another run holds the lock.
        """

    @abstractmethod
    def _remove_lock(self) -> None:
        """Remove the lock file or object if this process created it and no other run has taken it since."""

    def _is_own(self, text: bytes) -> bool:
        """Whether a lock's content has the ID of this launch of the run.

        Any machine of the run can have written the content.
        """
        owner = read_owner(text)
        return owner is not None and owner.start == self.start

    def _describe_owner(self, text: bytes, what: str) -> str:
        """Return an error message about the owner of this lock.

        Args:
            text: Content of the lock.
            what: Predicate of the message, such as `IN_USE`.
        """
        owner = read_owner(text)
        no_owner = f"its lock file {self._path.name} names no run ({len(text)} bytes long, as after a full disk)"
        return (
            f"{self._folder} {what}: {no_owner if owner is None else owner}. Two runs in one folder would remove and load each "
            "other's checkpoints; end that one, or give this one another project_dir"
        )

    def _warn_of_wait(self, text: bytes) -> None:
        """Log that this run waits to see whether the lock's owner still runs.

        Args:
            text: Content of the lock, which describes its owner.
        """
        log.warning("%s; waiting %g s for its next heartbeat", self._describe_owner(text, "was last used by"), SILENCE)


def read_owner(text: bytes) -> LockOwner | None:
    """Return the owner that is recorded in the content of a lock.

    Return None if the content is incomplete or was not written by Headway.
    """
    try:
        fields = dict(json.loads(text))
        fields.pop("beat", None)  # of a lock in an object store, which has no modification time to change
        owner = LockOwner(**fields)
    except (ValueError, TypeError):
        return None
    return owner if type(owner.pid) is int else None


def is_owner_alive(text: bytes) -> bool | None:
    """Whether the owner recorded in a lock's content is alive and is not this process.

    This process counts as not alive, because only another run's lock prevents a save. None if this is unknown, because
    the owner might run on another machine, or the content is not readable.
    """
    owner = read_owner(text)
    return None if owner is None else owner.is_alive and not owner.is_this_process


def _get_machine_id() -> str:
    """Return an ID of this machine since its boot, and of the PID namespace. "" if the system has none (not Linux)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _read_start_time(pid: int) -> str:
    """Return the start time of a process in the kernel's clock ticks, or "" if no such process runs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return ""
