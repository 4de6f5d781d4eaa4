"""Checkpoints in folders: which store holds one, which there are, and which go. Nothing else asks where a checkpoint lies.

On a disk a checkpoint is a folder (`stores.disk`), in an object store a prefix (`stores.objects`); both keep the same promises.
"""

import atexit
import contextlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from headway.checkpoint.format.foreign import checkpoints_in
from headway.checkpoint.format.manifest import Manifest, read_manifest
from headway.checkpoint.lock import PlaceLock
from headway.checkpoint.stores.disk import DiskStore, removing
from headway.checkpoint.stores.objects import ObjectStore
from headway.common import scope
from headway.common.object_path import ObjectPath, writable
from headway.errors import CheckpointError
from headway.log import get_logger

log = get_logger(__name__)


def store_of(folder: Path) -> DiskStore | ObjectStore:
    """What keeps a checkpoint, or a folder of checkpoints."""
    return ObjectStore(folder) if isinstance(folder, ObjectPath) else DiskStore(folder)


def fill(hook: Callable[[Path], None], staging: Path) -> None:
    """Let a hook put its files into the folder in which a save is prepared."""
    with writable(staging) as folder:
        hook(folder)


def commit(staging: Path, final: Path, manifest: Manifest) -> None:
    """Make the staged files the checkpoint `final`, where this run has the place still.

    Raises:
        OSError, CheckpointError: it could not; what was there is as it was.
    """
    store_of(final).commit(staging, manifest, partial(scope.own(Locks).prove, final))


def committed(parent: Path) -> list[Path]:
    """The committed checkpoints in a folder, the newest (the highest number at the end of its name) first."""
    return [parent / name for name in checkpoints_in(parent)]


def about(folder: Path) -> Mapping[str, Any]:
    """What a checkpoint's manifest says about it; nothing where it is damaged, which is told elsewhere."""
    try:
        return read_manifest(folder).about
    except CheckpointError:
        return {}


def copy_of(folder: Path) -> str:
    """The name under which a checkpoint was committed, where it lies under another one now: somebody's copy. Else ""."""
    name = str(about(folder).get("name", folder.name))
    return "" if name == folder.name else name


def originals(parent: Path) -> list[Path]:
    """The committed checkpoints in a folder that lie where a run put them, the newest first; copies are their maker's."""
    return [path for path in committed(parent) if not copy_of(path)]


def run_of(folder: Path) -> str | None:
    """The id of the run that saved a checkpoint; None where it is damaged."""
    try:
        return str(read_manifest(folder).about.get("run"))
    except CheckpointError:
        return None


def rotate(parent: Path, keep: int, protected: Iterable[Path] = (), run: str | None = None) -> list[Path]:
    """Remove all but the newest `keep` checkpoints (1 or more), those protected and copies; returns what was removed.

    Args:
        parent: the folder that holds them.
        keep: how many stay.
        protected: those that stay besides.
        run: only those of this run are counted and removed; None: all.
    """
    safe = {path.resolve() for path in protected}
    own = [path for path in originals(parent) if run is None or run_of(path) == run]
    old = [path for path in own[max(1, keep) :] if path.resolve() not in safe]
    for path in old:
        with removing(path):
            store_of(path).remove()
    return old


class Locks:
    """The locks that this process has; several Accelerators of it may save into one folder."""

    def __init__(self) -> None:
        self._held: dict[Path, PlaceLock] = {}
        atexit.register(self.release)

    def start_of(self, folder: Path) -> str:
        """Of the run that this process has locked a folder for; "" where it has not."""
        known = self._held.get(folder)
        return "" if known is None else known.start

    def hold(self, folder: Path, run: str, start: str) -> None:
        """Have a folder.

        Raises:
            CheckpointError: another run has it.
        """
        known = self._held.get(folder)
        try:
            if known is None:
                self._held[folder] = store_of(folder).lock(run, start)
            else:
                known.check()
        except OSError as error:
            log.warning_once("%s cannot be locked (%s): nothing keeps another run from saving there too", folder, error)

    def prove(self, final: Path) -> None:
        """Have what a checkpoint is to be committed in still, where it was locked.

        Raises:
            CheckpointError: another run has it.
        """
        for known in (self._held.get(final), self._held.get(final.parent)):
            if known is not None:
                known.check()

    def release(self, folder: Path | None = None) -> None:
        """Let go of a folder, or of all."""
        for each in [folder] if folder is not None else list(self._held):
            if (known := self._held.pop(each, None)) is not None:
                with contextlib.suppress(OSError):
                    known.release()
