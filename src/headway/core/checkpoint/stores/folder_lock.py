"""Lock file next to a checkpoint directory on a disk.

The content of the lock is first written to a temporary file and flushed to the disk. The file then gets the lock's name
by a hard link, which only one process can create. The owner touches the file every few seconds. The file's age is
measured with the file system's clock. Kernel locks are less reliable. Over NFS they can cover only one machine, or
remain after a machine has died.
"""

import contextlib
import errno
import json
import os
import secrets
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from headway.common.untrusted import read_regular_file
from headway.core.checkpoint import lock
from headway.errors import CheckpointError

_EMPTY = 2.0
"""Age in seconds from which an empty lock file counts as a leftover of a killed process.

The file of a living owner is never empty for long. On disks without hard links it is filled right after its creation.
"""
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES}
_MAX_BYTES = 65536
"""Maximum length of a lock file. A longer file is no lock."""


class FolderLock(lock.CheckpointLock):
    """Lock of a checkpoint directory on a disk. The lock is a file next to the directory."""

    _text = b""
    """Content with which this process creates the lock file. b"" before its first attempt."""
    _is_parent_new = False
    """Whether this process has created the folder that contains the lock file."""

    def check(self) -> None:
        """Raise `CheckpointError` if another run has taken the lock. Recreate the lock file if a user has deleted it.

        Raises:
            CheckpointError: If another run has taken the lock.
        """
        content = _read_content(self._path)
        if content is None:  # deleted by a user or a cleanup script
            self._create_lock()
        elif not self._is_own(content.text):
            raise CheckpointError(self._describe_owner(content.text, lock.TAKEN))

    def _remove_lock(self) -> None:
        """Delete the lock file if it still is this run's.

        Also delete the parent folder if the lock has created it, and it is empty.
        """
        content = _read_content(self._path)
        if content is not None and content.text == self._text:
            self._path.unlink(missing_ok=True)
            if self._is_parent_new:
                with contextlib.suppress(OSError):  # not empty: something was saved there
                    self._folder.parent.rmdir()

    def _create_lock(self) -> None:
        """Create the lock file, and start a thread that updates its modification time until the lock is released.

        If another run has left a lock file, wait until its owner counts as dead, and then replace the file. If another
        machine of this run has created the lock file on a shared disk, leave the file as it is and start no thread.

        Raises:
            CheckpointError: If another run that is alive holds the lock.
            OSError: If the disk is full or not writable.
        """
        self._is_parent_new = not self._folder.parent.exists()
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        self._text = (json.dumps(asdict(lock.LockOwner.describe_this_process(self._run, self.start))) + "\n").encode()
        while (handle := self._create_complete_file()) is None:
            content = _read_content(self._path)
            # Written by another machine of this run, on a shared folder.
            if content is not None and self._is_own(content.text):
                return
            self._wait_for_end()
        self._remove_leftovers(os.fstat(handle).st_mtime)
        self._end.set()  # ends an earlier thread, whose lock file is gone
        self._end = threading.Event()
        threading.Thread(target=_touch_until_end, args=(handle, self._end), name="headway-lock", daemon=True).start()

    def _create_complete_file(self) -> int | None:
        """Create the lock file with its full content. If this fails, no file is left.

        The content is written to a temporary file, to which the lock file is then a hard link.

        Return the open file descriptor, or None if the lock file already exists.

        Raises:
            OSError: If the disk is full or not writable.
        """
        staged = _make_temporary_path(self._path)
        handle = _open_new_file(staged)
        is_kept = False
        try:
            _write_and_flush(handle, self._text)
            try:
                os.link(staged, self._path)
                is_kept = True
            except FileExistsError:
                # Over NFS, the answer to a successful request can be lost. The repeated request then fails.
                is_kept = os.fstat(handle).st_nlink == 2
            except OSError as error:
                if error.errno not in _NO_HARD_LINKS:
                    raise
                return self._create_in_place()
            return handle if is_kept else None
        finally:
            if not is_kept:
                os.close(handle)
            staged.unlink(missing_ok=True)

    def _create_in_place(self) -> int | None:
        """Create the lock file on a disk without hard links.

        For a moment, the file exists without content.

        Return the open file descriptor, or None if the lock file already exists.

        Raises:
            OSError: If the disk is full or not writable. No file is left.
        """
        try:
            handle = _open_new_file(self._path)
        except FileExistsError:
            return None
        try:
            _write_and_flush(handle, self._text)
        except BaseException:
            os.close(handle)
            self._path.unlink(missing_ok=True)
            raise
        return handle

    def _remove_leftovers(self, now: float) -> None:
        """Remove temporary files of processes that were killed while they created a lock.

        Args:
            now: Current time according to the file system, in seconds since the epoch.
        """
        for path in self._path.parent.glob(f".{self._path.name}-*"):
            with contextlib.suppress(OSError):  # another process was faster
                if now - path.stat().st_mtime > lock.SILENCE:
                    path.unlink()

    def _wait_for_end(self) -> None:
        """Wait until the lock's owner counts as dead, then remove its lock file.

        An owner on this machine whose process has ended counts as dead at once. Otherwise the lock file must not have
        been touched for `lock.SILENCE` seconds, or `_EMPTY` seconds if it is empty. Return earlier if the lock file
        disappears or another run has replaced its content.

        Raises:
            CheckpointError: If the owner is alive.
        """
        first = current = _read_content(self._path)
        has_warned = False
        while current is not None and first is not None and current.text == first.text:
            is_alive = lock.is_owner_alive(current.text)
            if is_alive or current.modified != first.modified:
                raise CheckpointError(self._describe_owner(current.text, lock.IN_USE))
            max_age = lock.SILENCE if current.text else _EMPTY
            if is_alive is False or _read_disk_clock(self._path) - current.modified > max_age:
                self._remove_dead(current.text)
                return
            if not has_warned and current.text:
                has_warned = True
                self._warn_of_wait(current.text)
            time.sleep(1)
            current = _read_content(self._path)

    def _remove_dead(self, dead_text: bytes) -> None:
        """Remove the lock file of an owner that counts as dead, unless another run has replaced it since.

        Args:
            dead_text: Content of the dead owner's lock file.
        """
        aside = _make_temporary_path(self._path)
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            os.rename(self._path, aside)
            moved = _read_content(aside)
            # If another run has taken the folder since, put its file back.
            if moved is not None and moved.text != dead_text:
                os.rename(aside, self._path)
            aside.unlink(missing_ok=True)


def _make_temporary_path(path: Path) -> Path:
    """Return a random, unused file name in the folder of `path`."""
    return path.with_name(f".{path.name}-{secrets.token_hex(8)}")


def _open_new_file(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)


def _write_and_flush(handle: int, text: bytes) -> None:
    """Write all of `text` to a file descriptor and flush it to the disk.

    Some file systems report only at the flush that the disk is full.
    """
    rest = text
    while rest:
        rest = rest[os.write(handle, rest) :]
    os.fsync(handle)


def _touch_until_end(handle: int, end: threading.Event) -> None:
    """Touch the lock file every `lock.BEAT` seconds until `end` is set, then close its file descriptor."""
    try:
        while not end.wait(lock.BEAT):
            with contextlib.suppress(OSError):  # the file server may be unavailable for a while
                os.utime(handle)
    finally:
        os.close(handle)


class _LockContent(NamedTuple):
    """Content of a lock file.

    Attributes:
        text: Bytes of the file.
        modified: Modification time in seconds since the epoch, according to the file system.
    """

    text: bytes
    modified: float


def _read_content(path: Path) -> _LockContent | None:
    """Return the content and modification time of a lock file, or None if it does not exist.

    Raises:
        CheckpointError: If the file exists but cannot be read.
    """
    if not os.path.lexists(path):
        return None
    try:
        # The file is opened before its time is read, so that NFS asks its server for the current time.
        return _LockContent(read_regular_file(path, _MAX_BYTES), path.stat().st_mtime)
    except (CheckpointError, FileNotFoundError):
        if os.path.lexists(path):
            raise
        return None


def _read_disk_clock(path: Path) -> float:
    """Return the current time in seconds since the epoch according to the file system.

    Its clock might be that of a file server, so a temporary file is created to read it.

    Args:
        path: Lock file. The temporary file is created next to it.
    """
    probe = _make_temporary_path(path)
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
