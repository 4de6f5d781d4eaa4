"""Checkpoint directories: choose the store, list, commit and remove checkpoints, and hold this process's locks.

A checkpoint on a disk is a folder (`stores.disk`). A checkpoint in an object store consists of the objects under a
prefix (`headway.integrations.object_store`). Both stores give the same guarantees. All other modules call `find_store`
to get the store of a checkpoint.
"""

import atexit
import contextlib
import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from headway.common import scope
from headway.common.object_path import ObjectPath
from headway.core import extensions
from headway.core.checkpoint.format.foreign import list_checkpoint_names
from headway.core.checkpoint.format.manifest import Manifest, read_manifest
from headway.core.checkpoint.lock import CheckpointLock
from headway.core.checkpoint.stores.disk import DiskStore, warn_of_failed_removal
from headway.core.checkpoint.stores.protocol import CheckpointStore
from headway.errors import CheckpointError
from headway.log import get_logger

log = get_logger(__name__)


def find_store(folder: Path) -> CheckpointStore:
    """Return the store (disk or object store) of a checkpoint, or of a folder of checkpoints."""
    if isinstance(folder, ObjectPath):
        store: CheckpointStore = extensions.load("store", folder.scheme)(folder)
        return store
    return DiskStore(folder)


def commit_checkpoint(staging: Path, final: Path, manifest: Manifest) -> None:
    """Commit the files of a staging directory as a checkpoint, if this run still holds the lock.

    Args:
        staging: Staging directory with the files.
        final: Path of the checkpoint.
        manifest: Manifest that lists the files.

    Raises:
        OSError, CheckpointError: If the commit fails. An existing checkpoint at `final` is then unchanged.
    """
    find_store(final).commit(staging, manifest, partial(scope.get_or_create(HeldLocks).ensure_held, final))


def list_committed(parent: Path) -> list[Path]:
    """Return the committed checkpoints in a folder, newest first.

    The newest is the one with the highest number at the end of its name.
    """
    return [parent / name for name in list_checkpoint_names(parent)]


def read_about(folder: Path) -> Mapping[str, Any]:
    """Return the `about` section of a checkpoint's manifest, which contains counters, the world size and versions.

    Return an empty mapping if the manifest is missing or damaged.
    """
    try:
        return read_manifest(folder).about
    except CheckpointError:
        return {}


def find_original_name(folder: Path) -> str:
    """Return the name under which a run committed a checkpoint, or "" if its folder still has this name.

    A checkpoint with another name is a copy that a user made. Return "" also if the manifest is missing or damaged.
    """
    name = str(read_about(folder).get("name", folder.name))
    return "" if name == folder.name else name


def list_originals(parent: Path) -> list[Path]:
    """Return the committed checkpoints in a folder that still have the name under which a run saved them, newest first.

    Copies that a user made under other names are left out, because runs must neither resume from them nor remove them.
    """
    return [path for path in list_committed(parent) if not find_original_name(path)]


def read_run_id(folder: Path) -> str | None:
    """Return the ID of the run that saved a checkpoint, or None if the manifest is missing, damaged or names no run."""
    try:
        run = read_manifest(folder).about.get("run")
    except CheckpointError:
        return None
    return None if run is None else str(run)


def remove_old_checkpoints(
    parent: Path, keep: int, protected: Iterable[Path] = (), run: str | None = None, prefix: str = "checkpoint_"
) -> list[Path]:
    """Remove old checkpoints from a folder, and return their paths.

    The newest `keep` checkpoints, protected checkpoints, and copies that a user made are not removed. Checkpoints whose
    name is not `prefix` and a number were named by the script. They are not removed and do not count. If a removal
    fails, only a warning is logged. The returned list contains that checkpoint nevertheless.

    Args:
        parent: Folder that holds the checkpoints.
        keep: Number of newest checkpoints to keep. Values below 1 count as 1.
        protected: Additional checkpoints to keep, regardless of their age. Default: (), none.
        run: ID of the run whose checkpoints are counted and removed. Default: None, the checkpoints of all runs.
        prefix: Part of the names before the number. Default: "checkpoint_", for automatic naming.
    """
    protected_paths = {path.resolve() for path in protected}
    named = [path for path in list_originals(parent) if re.fullmatch(re.escape(prefix) + r"\d+", path.name)]
    own = [path for path in named if run is None or read_run_id(path) == run]
    old = [path for path in own[max(1, keep) :] if path.resolve() not in protected_paths]
    for path in old:
        with warn_of_failed_removal(path):
            find_store(path).remove()
    return old


class HeldLocks:
    """Registry of the checkpoint locks that this process holds, shared by all Accelerators of the process.

    Several Accelerators of one process may save into one folder, so they use one lock.
    """

    def __init__(self) -> None:
        self._locks: dict[Path, CheckpointLock] = {}
        """Locks that this process holds, by folder."""
        self._start_ids: dict[Path, str] = {}
        """Launch ID with which a rank of this run has locked a folder, also if this process does not hold the lock."""
        atexit.register(self.release)

    def get_start_id(self, folder: Path) -> str:
        """Return the launch ID (`LockOwner.start`) with which this run has locked a folder. Return "" if it has not.

        Args:
            folder: Folder of checkpoints.
        """
        lock = self._locks.get(folder)
        return self._start_ids.get(folder, "") if lock is None else lock.start

    def note_start_id(self, folder: Path, start: str) -> None:
        """Record that another rank of this run has locked a folder, so that this rank can save there alone.

        Args:
            folder: Folder of checkpoints.
            start: Launch ID with which the rank has locked it, as in `LockOwner`.
        """
        self._start_ids[folder] = start

    def lock_folder(self, folder: Path, run: str, start: str) -> None:
        """Lock a folder. If this process has locked the folder already, check that it still holds the lock.

        If the lock file cannot be created or read (`OSError`), only log a warning.

        Args:
            folder: Folder to lock.
            run: ID of the run.
            start: ID of this launch of the run, as in `LockOwner`.

        Raises:
            CheckpointError: If another run holds the lock, or has taken it from this one.
        """
        lock = self._locks.get(folder)
        try:
            if lock is None:
                self._locks[folder] = find_store(folder).lock(run, start)
            else:
                lock.check()
        except OSError as error:
            log.warning_once("%s cannot be locked (%s): another run could save to the same folder", folder, error)

    def ensure_held(self, final: Path) -> None:
        """Raise `CheckpointError` if another run has taken a lock that covers the checkpoint `final`.

        The locks of the checkpoint and of its parent folder are checked, if this process has taken them.

        Raises:
            CheckpointError: If another run holds one of these locks.
        """
        for lock in (self._locks.get(final), self._locks.get(final.parent)):
            if lock is not None:
                lock.check()

    def release(self, folder: Path | None = None) -> None:
        """Release the lock that this process holds on a folder, or all its locks if `folder` is None."""
        folders = [folder] if folder is not None else list(dict.fromkeys([*self._locks, *self._start_ids]))
        for each in folders:
            self._start_ids.pop(each, None)
            lock = self._locks.pop(each, None)
            if lock is not None:
                with contextlib.suppress(OSError, CheckpointError):  # the lock file cannot be read or removed
                    lock.release()
