"""One run at a time saves into a folder: a file beside it says which, and how one finds out that it is gone.

The file is made where there is none, which one process can do. Its holder touches it every few seconds, by the disk's clock. Who
finds it asks the kernel where the holder was a process of this machine, since its start; else it waits for a touch: one that
comes is a run that lives, and silence a machine that died. Locks of the kernel say less: over NFS they may hold on this machine
only, or outlive a dead one. Who only reads checkpoints needs no lock.

In an object store the file is an object: written where there is none, and anew every few seconds where it is still the holder's own
(if-match). Who finds it watches whether it changes, by a clock of its own; nobody's time of day is compared with anybody's.
"""

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headway.common.object_path import ObjectPath
from headway.common.untrusted import printable, read_regular
from headway.errors import CheckpointError
from headway.log import get_logger

log = get_logger(__name__)

BEAT, SILENCE = 5.0, 30.0
"""Seconds between two touches, and without any after which a holder counts as gone."""
_MOST_BYTES = 65536
_IN_USE, _TAKEN = "is in use by another run", "was taken by another run while this one did not respond"


@dataclass(frozen=True)
class LockOwner:
    """The process that has a folder.

    Attributes:
        run: the id of its run, which a run that is resumed keeps.
        start: of this start of the run; alike on all machines.
        script: what it runs.
        host: its machine, as people call it.
        machine: as nothing else is called: the start of its kernel, and which processes see each other; "" where that is unknown.
        pid: its number there.
        born: when it was started, by the kernel's clock.
        since: when it took the folder.
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
        return printable(f"run {self.run} ({self.script}, process {self.pid} on {self.host}, since {self.since})")

    @classmethod
    def here(cls, run: str, start: str) -> "LockOwner":
        """This process."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        script = os.path.basename(sys.argv[0] or "python")
        return cls(run, start, script, socket.gethostname(), _machine(), os.getpid(), _born(os.getpid()), now)

    @property
    def is_here(self) -> bool:
        """Is it this process?"""
        here = LockOwner.here(self.run, self.start)
        return (self.host, self.machine, self.pid, self.born) == (here.host, here.machine, here.pid, here.born)

    @property
    def lives(self) -> bool | None:
        """Is the process there? None where only its touches tell."""
        return _born(self.pid) == self.born if self.machine and self.machine == _machine() else None


class PlaceLock(ABC):
    """The lock of one place; what makes it so is a file beside it, or an object.

    Args:
        folder: what is held.
        run, start: the run that holds it, as `LockOwner` has them.

    Raises:
        CheckpointError: another run has it.
    """

    _path: Any

    def __init__(self, folder: Path, run: str, start: str) -> None:
        self.start = start
        self._run, self._folder = run, folder
        self._path = folder.with_name(f"{folder.name}.lock")
        self._pid, self._over = os.getpid(), threading.Event()
        self._take()

    @abstractmethod
    def check(self) -> None:
        """Have it still.

        Raises:
            CheckpointError: another run has taken it, as this one was silent for long.
        """

    def release(self) -> None:
        """Let others have it; nothing in a process that was forked."""
        if os.getpid() == self._pid and not self._over.is_set():
            self._over.set()
            self._remove()

    @abstractmethod
    def _take(self) -> None:
        """Make the file, or the object, where nobody else has."""

    @abstractmethod
    def _remove(self) -> None:
        """Remove it, where it is this run's still."""

    def _is_own(self, text: bytes) -> bool:
        """Is it of this start of the run, perhaps by another machine?"""
        holder = _holder(text)
        return holder is not None and holder.start == self.start

    def _told(self, text: bytes, what: str) -> str:
        holder = _holder(text)
        return (
            f"{self._folder} {what}{'' if holder is None else f': {holder}'}. Two runs in one folder would remove and load each "
            "other's checkpoints; end that one, or give this one another project_dir"
        )

    def _warn(self, text: bytes) -> None:
        log.warning("%s; waiting %g s for a sign of life", self._told(text, "was last used by"), SILENCE)


class FolderLock(PlaceLock):
    """The lock of a folder: a file beside it."""

    _text = b""
    _is_new = False

    def check(self) -> None:
        """Have it still; a file that somebody has removed is made again."""
        found = _read(self._path)
        if found is None:  # somebody has cleaned up
            self._take()
        elif not self._is_own(found[0]):
            raise CheckpointError(self._told(found[0], _TAKEN))

    def _remove(self) -> None:
        found = _read(self._path)
        if found is not None and found[0] == self._text:
            self._path.unlink(missing_ok=True)
            if self._is_new:
                with contextlib.suppress(OSError):  # something was saved
                    self._folder.parent.rmdir()

    def _take(self) -> None:
        self._is_new = not self._folder.parent.exists()
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        self._text = (json.dumps(asdict(LockOwner.here(self._run, self.start))) + "\n").encode()
        handle = None
        while handle is None:
            try:
                handle = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
            except FileExistsError:
                found = _read(self._path)
                if found is not None and self._is_own(found[0]):  # of another machine, which sees the same folder
                    return
                self._wait_for_end()
        os.write(handle, self._text)
        self._over.set()  # a thread that touches a file which is gone
        self._over = threading.Event()
        threading.Thread(target=_touch, args=(handle, self._over), name="headway-lock", daemon=True).start()

    def _wait_for_end(self) -> None:
        """Take away the file of a holder that is gone.

        Raises:
            CheckpointError: the holder lives.
        """
        first = found = _read(self._path)
        has_told = False
        while found is not None and first is not None and found[0] == first[0]:
            lives = _lives(found[0])
            if lives or found[1] != first[1]:
                raise CheckpointError(self._told(found[0], _IN_USE))
            if lives is False or _now(self._path) - found[1] > SILENCE:
                self._displace(found[0])
                return
            if not has_told:
                has_told = True
                self._warn(found[0])
            time.sleep(1)
            found = _read(self._path)

    def _displace(self, judged: bytes) -> None:
        aside = self._path.with_name(f".{self._path.name}-{secrets.token_hex(8)}")
        with contextlib.suppress(FileNotFoundError):  # another one has done it
            os.rename(self._path, aside)
            found = _read(aside)
            if found is not None and found[0] != judged:  # and has taken the folder since
                os.rename(aside, self._path)
            aside.unlink(missing_ok=True)


class ObjectLock(PlaceLock):
    """The lock of a place in an object store: an object beside it."""

    def __init__(self, folder: ObjectPath, run: str, start: str) -> None:
        self._owner = asdict(LockOwner.here(run, start))
        self._requests = threading.Lock()
        self._token, self._count, self._etag = secrets.token_hex(8), 0, ""
        self._is_lost = False
        super().__init__(folder, run, start)

    def check(self) -> None:
        """Have it still, as the store says."""
        if self._etag and not self._beat():
            found = self._path.client.get(self._path.key)
            raise CheckpointError(self._told(b"" if found is None else found[0], _TAKEN))

    def _remove(self) -> None:
        with contextlib.suppress(CheckpointError):  # it is found to be silent
            if self._etag and self._beat():  # nobody takes it in the next moments
                self._path.unlink()

    def _beat(self) -> bool:
        with self._requests:
            if self._is_lost:
                return False
            self._is_lost = not self._write(self._etag)
            return not self._is_lost

    def _write(self, replaces: str | None) -> bool:
        client, key = self._path.client, self._path.key
        while True:
            self._count += 1
            text = json.dumps({**self._owner, "beat": f"{self._token} {self._count}"}).encode()
            etag = client.put(key, text, replaces)
            if etag is not None:
                self._etag = etag
                return True
            found = client.get(key)
            if found is None or f'"beat": "{self._token} '.encode() not in found[0] or found[1] == replaces:
                return False
            replaces = found[1]  # an earlier write of its own, whose answer was lost for good

    def _take(self) -> None:
        client, key, judged = self._path.client, self._path.key, None
        while not self._write(judged):
            found = client.get(key)
            if found is not None:
                if self._is_own(found[0]):  # by another machine
                    self._etag = ""
                    return
                self._wait_for_end(*found)
            judged = None if found is None else found[1]
        threading.Thread(target=self._beats, name="headway-lock", daemon=True).start()

    def _wait_for_end(self, text: bytes, etag: str) -> None:
        """Return when the holder is gone, or the object.

        Raises:
            CheckpointError: the holder lives.
        """
        client, key, lives = self._path.client, self._path.key, _lives(text)
        if lives is None:
            self._warn(text)
        until = time.monotonic() + (SILENCE if lives is None else 0)
        while time.monotonic() < until:
            time.sleep(min(1.0, SILENCE / 10))
            found = client.get(key)
            if found is None:
                return
            lives = found[1] != etag
            if lives:
                break
        if lives:
            raise CheckpointError(self._told(text, _IN_USE))

    def _beats(self) -> None:
        while not self._over.wait(BEAT):
            with contextlib.suppress(CheckpointError):  # a store that is away for a while
                if not self._beat():
                    return


def _touch(handle: int, over: threading.Event) -> None:
    try:
        while not over.wait(BEAT):
            with contextlib.suppress(OSError):  # a server that is away for a while
                os.utime(handle)
    finally:
        os.close(handle)


def _read(path: Path) -> tuple[bytes, float] | None:
    """What a file holds, and when it was last touched; None where there is none."""
    if not os.path.lexists(path):
        return None
    try:
        return read_regular(path, _MOST_BYTES), path.stat().st_mtime  # opened anew, so that NFS asks its server
    except (CheckpointError, FileNotFoundError):
        if os.path.lexists(path):
            raise
        return None


def _now(path: Path) -> float:
    """The time by the clock of the disk, which is a server's perhaps."""
    probe = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _holder(text: bytes) -> LockOwner | None:
    """Who has written it; None where it is not written yet, or by nobody of ours."""
    try:
        found = dict(json.loads(text))
        found.pop("beat", None)
        told = LockOwner(**found)
    except (ValueError, TypeError):
        return None
    return told if type(told.pid) is int else None


def _lives(text: bytes) -> bool | None:
    """Is who has written it another process, and there? None where only its touches tell."""
    holder = _holder(text)
    return None if holder is None else holder.lives and not holder.is_here


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _born(pid: int) -> str:
    """When a process was started, in the kernel's ticks; "" where there is none that runs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return ""
