"""Checkpoints as folders: staged, committed by one rename, found again, and the old ones removed.

At every moment a reader finds each checkpoint whole or not at all. What a killed process leaves behind begins with a
dot, and is swept by the next save. Places in object stores are passed on to `stores.objects`, which keeps the same promises.
"""

import contextlib
import ctypes
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from headway.checkpoint.format.foreign import checkpoints_in
from headway.checkpoint.format.manifest import MANIFEST, Manifest, read_manifest
from headway.checkpoint.lock import Locks
from headway.checkpoint.stores import objects
from headway.common import scope
from headway.common.atomic import replacing
from headway.common.object_path import ObjectPath, writable
from headway.errors import CheckpointError, ObjectStoreError
from headway.log import get_logger

log = get_logger(__name__)

LATEST = "latest"
_STAGED, _REMOVED, _REPLACED = ".staging-", ".removing-", ".replaced-"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def staging_folder(final: Path, nonce: str) -> Path:
    """The folder beside `final` in which a save with this nonce (16 hexadecimal digits) is prepared."""
    if isinstance(final, ObjectPath):
        return objects.data_folder(final, nonce)
    return final.parent / f"{_STAGED}{final.name}-{nonce}"


def fill(hook: Callable[[Path], None], staging: Path) -> None:
    """Let a hook put its files into the folder in which a save is prepared."""
    with writable(staging) as folder:
        hook(folder)


def contents(folder: Path) -> Path:
    """Where a checkpoint's files lie: in the folder itself; in an object store, in the one that its manifest names."""
    if not isinstance(folder, ObjectPath):
        return folder
    place: Path = folder / next(iter(read_manifest(folder).files), "").partition("/")[0]
    return place


def check_target(final: Path) -> None:
    """Refuse to write over anything but a checkpoint.

    Raises:
        CheckpointError: `final` is a file, or a folder that holds something else.
    """
    if isinstance(final, ObjectPath):
        objects.check_target(final)
    elif final.is_dir():
        if not (final / MANIFEST).exists() and any(final.iterdir()):
            raise CheckpointError(
                f"{final} holds files, but no checkpoint of Headway's, and would be replaced as a whole; give a new folder"
            )
    elif final.exists() or final.is_symlink():
        raise CheckpointError(f"{final} is not a folder; give the name of a folder for the checkpoint")


def abandon(staging: Path) -> None:
    """Remove what a save that failed has written; no rank that still writes finds the folder again."""
    if isinstance(staging, ObjectPath):
        objects.abandon(staging)
        return
    aside = staging.with_name(f"{staging.name[:-16]}{secrets.token_hex(8)}")
    os.rename(staging, aside)
    shutil.rmtree(aside, ignore_errors=True)


def commit(staging: Path, final: Path, manifest: Manifest) -> None:
    """Make the staged files a checkpoint: manifest, force everything to the disk, one rename, force that as well.

    A checkpoint that is there already is exchanged for the new one in the same moment. Where the disk does not confirm the rename,
    it is undone: a save that failed has left everything as it was.

    Raises:
        OSError: the disk is full, or the folder not writable; the former checkpoint is as it was.
        CheckpointError: what is to be written is not what a load would take.
    """
    if isinstance(staging, ObjectPath) and isinstance(final, ObjectPath):
        objects.commit(staging, final, manifest, lambda: scope.own(Locks).prove(final))
        return
    data = manifest.encode()
    Manifest.decode(data)  # what could not be read back must not take the place of what can
    with open(staging / MANIFEST, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(staging)
    is_exchange = (final / MANIFEST).exists()
    if is_exchange:
        _exchange(staging, final)
    else:
        os.rename(staging, final)  # onto nothing, or onto an empty folder
    try:
        sync_folder(final.parent)
    except OSError:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            if is_exchange:
                _exchange(staging, final)
            else:
                os.rename(final, staging)
        raise
    if is_exchange:
        _discard(staging)


def _exchange(new: Path, final: Path) -> None:
    """Let the two folders swap names in one step; where the system cannot, the old one steps aside first."""
    if sys.platform == "linux":
        swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if swap is not None and swap(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(final), _RENAME_EXCHANGE) == 0:
            return
    aside = final.parent / f"{_REPLACED}{final.name}"
    if aside.exists():
        remove(aside)
    os.rename(final, aside)
    os.rename(new, final)
    sync_folder(final.parent)
    os.rename(aside, new)


def sync_folder(folder: Path) -> None:
    """Force the folder's entries to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def point_latest(folder: Path) -> None:
    """Let the file `latest` beside the checkpoint name it; for people and scripts, `newest` does not trust it."""
    if isinstance(folder, ObjectPath):
        (folder.parent / LATEST).write_text(folder.name + "\n")
        return
    with replacing(folder.parent / LATEST) as staged, open(staged, "w") as file:
        file.write(folder.name + "\n")
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder.parent)


def committed(parent: Path) -> list[Path]:
    """The committed checkpoints in a folder, the newest (the highest number at the end of its name) first."""
    return [parent / name for name in checkpoints_in(parent)]


def copy_of(folder: Path) -> str:
    """The name under which a checkpoint was committed, where it lies under another one now: somebody's copy. Else ""."""
    try:
        name = str(read_manifest(folder).about.get("name", folder.name))
    except CheckpointError:
        return ""  # it is named as damaged elsewhere
    return "" if name == folder.name else name


def originals(parent: Path) -> list[Path]:
    """The committed checkpoints in a folder that lie where a run put them, the newest first; copies are their maker's."""
    return [path for path in committed(parent) if not copy_of(path)]


def locate(path: Path) -> Path:
    """The folder of the checkpoint that was saved as `path`.

    Raises:
        CheckpointError: there is none.
    """
    if isinstance(path, ObjectPath) or os.path.isfile(path / MANIFEST):
        return path
    aside = path.parent / f"{_REPLACED}{path.name}"
    if os.path.isfile(aside / MANIFEST):  # killed between two renames, where the system cannot exchange names
        return aside
    read_manifest(path)
    return path


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
        _discard(path)
    return old


def _discard(folder: Path) -> None:
    """Remove what is no longer needed; where that fails, say so: what was saved is saved, and the next save tries again."""
    try:
        remove(folder)
    except (OSError, ObjectStoreError) as error:
        log.warning_once("%s could not be removed (%s); the other checkpoints are intact", folder, error)


def remove(folder: Path) -> None:
    """Remove a checkpoint: first its name, in one step, then its files."""
    if isinstance(folder, ObjectPath):
        objects.remove(folder)
        return
    doomed = folder
    if not folder.name.startswith("."):
        doomed = folder.parent / f"{_REMOVED}{folder.name}"
        if doomed.exists() or doomed.is_symlink():
            _remove_tree(doomed)
        os.rename(folder, doomed)
    try:
        if doomed is not folder:  # else a power cut could bring the name back for a folder whose files are gone
            sync_folder(folder.parent)
        _remove_tree(doomed)
    except KeyboardInterrupt:  # a second one leaves it to the next save
        shutil.rmtree(doomed, ignore_errors=True)
        raise


def _remove_tree(folder: Path) -> None:
    """A folder, or the link to one: where it leads stays."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def sweep(parent: Path, name: str | None = None) -> list[Path]:
    """Remove what killed saves left behind, of the checkpoint called `name` or (None) of all; returns what it removed.

    Not to be called while a save of that name is under way.
    """
    if isinstance(parent, ObjectPath):
        return objects.sweep(parent, name)
    if not parent.is_dir():
        return []
    wanted = ".+" if name is None else re.escape(name)
    pattern = re.compile(rf"{_STAGED}{wanted}-[0-9a-f]{{16}}|({_REMOVED}|{_REPLACED}){wanted}")
    left = [path for path in parent.iterdir() if pattern.fullmatch(path.name) and _is_litter(path)]
    for path in left:
        _discard(path)
    (parent / f".{LATEST}.tmp").unlink(missing_ok=True)
    return left


def _is_litter(path: Path) -> bool:
    if not path.name.startswith(_REPLACED):
        return True
    final = path.parent / path.name.removeprefix(_REPLACED)
    return (final / MANIFEST).is_file()  # else it is the only one there is
