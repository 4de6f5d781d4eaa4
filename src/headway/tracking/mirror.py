"""A run's files in an object store: written to a local folder, and uploaded from there every half minute and at the end.

Objects cannot be appended to, so that a log is sent whole each time it has grown. What a killed process logged after the last time is
lost there; values that are logged again after a resume replace those of the same steps, as in a local log.
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
from headway.errors import ObjectStoreError
from headway.log import get_logger
from headway.tracking.runlog import FILE

log = get_logger(__name__)

EVERY = 30.0
"""Seconds between two looks at what has changed."""


class MirroredFolder:
    """A local folder (in TMPDIR, removed at the exit) whose files are kept in an object store.

    Args:
        target: where; the run's log that is there is taken over first.

    Attributes:
        folder: the local one.
    """

    def __init__(self, target: ObjectPath) -> None:
        self._target, self._sent = target, dict[str, tuple[int, int]]()
        self.folder = Path(tempfile.mkdtemp(prefix="headway-log-"))
        self._pid, self._sending, self._over = os.getpid(), threading.Lock(), threading.Event()
        fetch_file(target / FILE, self.folder / FILE)
        threading.Thread(target=self._watch, name="headway-mirror", daemon=True).start()
        atexit.register(self._close)

    def send(self) -> None:
        """Send the files that have changed; where that fails, say so: the next time sends them too."""
        with self._sending, contextlib.suppress(FileNotFoundError):
            for path in sorted(each for each in self.folder.rglob("*") if each.is_file()):
                name, about = path.relative_to(self.folder).as_posix(), path.stat()
                if self._sent.get(name) == (state := (about.st_size, about.st_mtime_ns)):
                    continue
                try:
                    with open(path, "rb") as source, (self._target / name).open("wb") as file:
                        shutil.copyfileobj(source, file, PART)
                except ObjectStoreError as error:
                    log.warning_once("%s could not be sent to the object store: %s", name, error)
                    return
                self._sent[name] = state

    def _watch(self) -> None:
        while not self._over.wait(EVERY):
            self.send()

    def _close(self) -> None:
        if os.getpid() == self._pid:
            self._over.set()
            self.send()
            shutil.rmtree(self.folder, ignore_errors=True)


class _Mirrors(dict[ObjectPath, MirroredFolder]):
    """The folders that this process mirrors, by their places."""


def local_folder(place: ObjectPath) -> Path:
    """The folder to write a run's files to, which is mirrored there."""
    known = scope.own(_Mirrors)
    if place not in known:
        known[place] = MirroredFolder(place)
    return known[place].folder


def send_all() -> None:
    """Send what has changed in any of the folders now."""
    for mirror in scope.own(_Mirrors).values():
        mirror.send()


def fetch_file(source: ObjectPath, target: Path) -> bool:
    """Copy a file from an object store, where there is one."""
    try:
        with source.open() as file:
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(target, "wb") as made:
                shutil.copyfileobj(file, made, PART)
    except FileNotFoundError:
        return False
    return True


def fetch_log(place: ObjectPath) -> Path | None:
    """A run's log in an object store as a local file in a folder of the run's name: that object, or the one log below; None: none."""
    below = [place / name for name, _ in place.below() if name == FILE or name.endswith(f"/{FILE}")]
    found = [place] if place.name == FILE else below
    target = Path(tempfile.mkdtemp(prefix="headway-log-")) / (found[0].parent.name if found else "run") / FILE
    return target if len(found) == 1 and fetch_file(found[0], target) else None
