"""Copies of a run's files in an object store. Files are written locally, and uploaded every 30 s and at the end.

Object stores cannot append to a file, so a log that has grown is uploaded completely. If a process is killed, values
logged after the last upload are missing in the object store. Values that are logged again after a resume replace the
earlier values of their steps, as they do in a local log.
"""

import atexit
import contextlib
import os
import shutil
import tempfile
import threading
from pathlib import Path

from headway.common import scope
from headway.common.object_path import PART, ObjectPath
from headway.core.tracking.runlog import FILE
from headway.errors import ObjectStoreError
from headway.log import get_logger

log = get_logger(__name__)

EVERY = 30.0
"""Seconds between two checks for changed files."""


class MirroredFolder:
    """Local temporary folder whose files are copied to an object store. It is removed when the process exits.

    Args:
        target: Folder in the object store. If it contains a run log, the log is downloaded first.

    Attributes:
        folder: Path of the local folder.
    """

    def __init__(self, target: ObjectPath) -> None:
        self._target = target
        # Size in bytes and modification time in ns of each file when it was last uploaded, by relative path.
        self._uploaded = dict[str, tuple[int, int]]()
        self.folder = Path(tempfile.mkdtemp(prefix="headway-log-"))
        self._pid = os.getpid()
        self._upload_lock = threading.Lock()
        self._end = threading.Event()
        fetch_file(target / FILE, self.folder / FILE)
        threading.Thread(target=self._send_until_end, name="headway-mirror", daemon=True).start()
        atexit.register(self._send_and_remove)

    def send(self) -> None:
        """Upload the files that have changed since they were last uploaded, in the order of their names.

        The first failed upload ends the call, with a warning. It and the remaining files are uploaded in the next call.
        A file that is removed during the call is skipped.
        """
        with self._upload_lock:
            for path in sorted(each for each in self.folder.rglob("*") if each.is_file()):
                try:
                    with contextlib.suppress(FileNotFoundError):
                        self._send_changed(path)
                except (OSError, ObjectStoreError) as error:
                    name = path.relative_to(self.folder)
                    log.warning_once("%s could not be sent to the object store: %s", name, error)
                    return

    def _send_changed(self, path: Path) -> None:
        """Upload a file if its size or its modification time has changed since it was last uploaded."""
        name, status = path.relative_to(self.folder).as_posix(), path.stat()
        state = status.st_size, status.st_mtime_ns
        if self._uploaded.get(name) != state:
            with open(path, "rb") as source, (self._target / name).open("wb") as file:
                shutil.copyfileobj(source, file, PART)
            self._uploaded[name] = state

    def _send_until_end(self) -> None:
        """Upload changed files every 30 s until the process exits."""
        while not self._end.wait(EVERY):
            self.send()

    def _send_and_remove(self) -> None:
        """Upload changed files, and remove the local folder. Do nothing in a forked process, which inherits the hook."""
        if os.getpid() == self._pid:
            self._end.set()
            self.send()
            shutil.rmtree(self.folder, ignore_errors=True)


class _Mirrors(dict[ObjectPath, MirroredFolder]):
    """Registry of this process's `MirroredFolder` objects, by their folders in the object store."""


def make_local_folder(place: ObjectPath) -> Path:
    """Return a local folder for a run's files. Its files are copied to the object store.

    Each folder in the object store has one local folder per process, so repeated calls return the same path.

    Args:
        place: Folder in the object store.
    """
    mirrors = scope.get_or_create(_Mirrors)
    if place not in mirrors:
        mirrors[place] = MirroredFolder(place)
    return mirrors[place].folder


def send_all() -> None:
    """Upload the changed files of all local folders that have a copy in an object store."""
    for mirror in scope.get_or_create(_Mirrors).values():
        mirror.send()


def fetch_file(source: ObjectPath, target: Path) -> bool:
    """Download a file from an object store, and return whether it exists.

    Args:
        source: Object to download.
        target: Local path. Missing folders are created.

    Raises:
        ObjectStoreError: If the store refuses the request or does not answer.
    """
    try:
        with source.open() as file:
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(target, "wb") as local_file:
                shutil.copyfileobj(file, local_file, PART)
    except FileNotFoundError:
        return False
    return True


def fetch_log(place: ObjectPath) -> Path | None:
    """Download a run log to a local folder with the run's name, and return its path.

    Return None if there is no run log, or if there are several.

    Args:
        place: Object-store path of the log, or of a folder that contains exactly one log at any depth.
    """
    if place.name == FILE:
        logs = [place]
    else:
        logs = [place / name for name, _ in place.list_objects() if name == FILE or name.endswith(f"/{FILE}")]
    if len(logs) != 1:
        return None
    target = Path(tempfile.mkdtemp(prefix="headway-log-")) / logs[0].parent.name / FILE
    return target if fetch_file(logs[0], target) else None
