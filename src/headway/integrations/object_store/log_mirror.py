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
        self._sent = dict[str, tuple[int, int]]()
        self.folder = Path(tempfile.mkdtemp(prefix="headway-log-"))
        self._pid = os.getpid()
        self._sending = threading.Lock()
        self._over = threading.Event()
        fetch_file(target / FILE, self.folder / FILE)
        threading.Thread(target=self._send_until_over, name="headway-mirror", daemon=True).start()
        atexit.register(self._send_and_remove)

    def send(self) -> None:
        """Upload the files that have changed since they were last uploaded, in the order of their names.

        The first failed upload ends the call, with a warning. It and the remaining files are uploaded in the next call.
        A file that is removed during the call is skipped.
        """
        with self._sending:
            for path in sorted(each for each in self.folder.rglob("*") if each.is_file()):
                try:
                    with contextlib.suppress(FileNotFoundError):
                        self._send_changed(path)
                except (OSError, ObjectStoreError) as error:
                    name = path.relative_to(self.folder)
                    log.warning_once("%s could not be sent to the object store: %s", name, error)
                    return

    def _send_changed(self, path: Path) -> None:
        name, about = path.relative_to(self.folder).as_posix(), path.stat()
        state = about.st_size, about.st_mtime_ns
        if self._sent.get(name) != state:
            with open(path, "rb") as source, (self._target / name).open("wb") as file:
                shutil.copyfileobj(source, file, PART)
            self._sent[name] = state

    def _send_until_over(self) -> None:
        while not self._over.wait(EVERY):
            self.send()

    def _send_and_remove(self) -> None:
        if os.getpid() == self._pid:
            self._over.set()
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
    known = scope.get_or_create(_Mirrors)
    if place not in known:
        known[place] = MirroredFolder(place)
    return known[place].folder


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
            with open(target, "wb") as made:
                shutil.copyfileobj(file, made, PART)
    except FileNotFoundError:
        return False
    return True


def fetch_log(place: ObjectPath) -> Path | None:
    """Download a run log to a local folder with the run's name, and return its path.

    Return None if there is no run log, or if there are several.

    Args:
        place: Object-store path of the log, or of a folder that contains exactly one log at any depth.
    """
    below = [place / name for name, _ in place.list_objects() if name == FILE or name.endswith(f"/{FILE}")]
    found = [place] if place.name == FILE else below
    target = Path(tempfile.mkdtemp(prefix="headway-log-")) / (found[0].parent.name if found else "run") / FILE
    return target if len(found) == 1 and fetch_file(found[0], target) else None
