"""Checkpoints as folders of a disk: staged, committed by one rename, and removed, first their name and then their files.

At every moment a reader finds each checkpoint whole or not at all. What a killed process leaves behind begins with a
dot, and is swept by the next save.
"""

import contextlib
import ctypes
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from headway.checkpoint.format.manifest import MANIFEST, Manifest, read_manifest
from headway.checkpoint.lock import FolderLock
from headway.common.atomic import replacing
from headway.errors import CheckpointError, ObjectStoreError
from headway.log import get_logger

log = get_logger(__name__)

LATEST = "latest"
"""The file beside checkpoints that names the newest; for people and scripts, a resume does not trust it."""
_STAGED, _REMOVED, _REPLACED = ".staging-", ".removing-", ".replaced-"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class DiskStore:
    """A folder on a disk that is a checkpoint, or holds some.

    Args:
        folder: the folder.

    Attributes:
        poll: seconds between two looks at what other ranks have written.
        needs_lock: may two runs that commit one checkpoint at the same time both succeed? A rename fails for the second.
        verifies_on_read: are bytes compared by who reads them, and read once?
    """

    poll = 0.005
    needs_lock = False
    verifies_on_read = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def check_name(self) -> None:
        """Any folder may become a checkpoint."""

    def check_target(self) -> None:
        """Refuse to write over anything but a checkpoint.

        Raises:
            CheckpointError: it is a file, or a folder that holds something else.
        """
        final = self.folder
        if final.is_dir():
            if not (final / MANIFEST).exists() and any(final.iterdir()):
                raise CheckpointError(
                    f"{final} holds files, but no checkpoint of Headway's, and would be replaced as a whole; give a new folder"
                )
        elif final.exists() or final.is_symlink():
            raise CheckpointError(f"{final} is not a folder; give the name of a folder for the checkpoint")

    def lock(self, run: str, start: str) -> FolderLock:
        """Keep other runs from saving here; as `LockOwner` has them.

        Raises:
            CheckpointError: another run has it.
        """
        return FolderLock(self.folder, run, start)

    # ---------------------------------------------------------------- save

    def staging(self, nonce: str) -> Path:
        """The folder beside it in which a save with this nonce (16 hexadecimal digits) is prepared."""
        return self.folder.parent / f"{_STAGED}{self.folder.name}-{nonce}"

    def abandon(self) -> None:
        """Remove this staging folder of a save that failed; no rank that still writes finds it again."""
        aside = self.folder.with_name(f"{self.folder.name[:-16]}{secrets.token_hex(8)}")
        os.rename(self.folder, aside)
        shutil.rmtree(aside, ignore_errors=True)

    def commit(self, staging: Path, manifest: Manifest, fence: Callable[[], None]) -> None:
        """Make the staged files a checkpoint: manifest, force everything to the disk, one rename, force that as well.

        A checkpoint that is there already is exchanged for the new one in the same moment. Where the disk does not confirm the
        rename, it is undone: a save that failed has left everything as it was.

        Args:
            staging: where the files lie.
            manifest: names them.
            fence: not needed here, as a rename fails where another run has taken the folder away.

        Raises:
            OSError: the disk is full, or the folder not writable; the former checkpoint is as it was.
            CheckpointError: what is to be written is not what a load would take.
        """
        final, data = self.folder, manifest.encode()
        Manifest.decode(data)  # what could not be read back must not take the place of what can
        write_forced(staging / MANIFEST, data)
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
            with removing(staging):
                DiskStore(staging).remove()

    def point_latest(self) -> None:
        """Let the file `latest` beside the checkpoint name it."""
        with replacing(self.folder.parent / LATEST) as staged:
            write_forced(staged, os.fsencode(f"{self.folder.name}\n"))
        sync_folder(self.folder.parent)

    # ---------------------------------------------------------------- find

    def locate(self) -> Path:
        """Where the checkpoint lies that was saved here.

        Raises:
            CheckpointError: there is none.
        """
        path = self.folder
        if os.path.isfile(path / MANIFEST):
            return path
        aside = path.parent / f"{_REPLACED}{path.name}"
        if os.path.isfile(aside / MANIFEST):  # killed between two renames, where the system cannot exchange names
            return aside
        read_manifest(path)
        return path

    def contents(self) -> Path:
        """Where the checkpoint's files lie."""
        return self.folder

    def identity(self) -> tuple[int, int]:
        """Which file its manifest is."""
        found = (self.folder / MANIFEST).stat()
        return found.st_ino, found.st_mtime_ns

    def absent(self, manifest: Manifest) -> str | None:
        """Nothing is looked for here, as whoever verifies a checkpoint on a disk reads its files."""

    def fetched(self, manifest: Manifest) -> None:
        """Nothing has to be fetched from a disk."""

    # ---------------------------------------------------------------- remove

    def remove(self) -> None:
        """Remove the checkpoint: first its name, in one step, then its files."""
        folder = doomed = self.folder
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

    def sweep(self, name: str | None = None) -> list[Path]:
        """Remove what killed saves left behind, of the checkpoint here called `name` or (None) of all; returns what it removed.

        Not to be called while a save of that name is under way.
        """
        parent = self.folder
        if not parent.is_dir():
            return []
        wanted = ".+" if name is None else re.escape(name)
        pattern = re.compile(rf"{_STAGED}{wanted}-[0-9a-f]{{16}}|({_REMOVED}|{_REPLACED}){wanted}")
        left = [path for path in parent.iterdir() if pattern.fullmatch(path.name) and _is_litter(path)]
        for path in left:
            with removing(path):
                DiskStore(path).remove()
        (parent / f".{LATEST}.tmp").unlink(missing_ok=True)
        return left


@contextlib.contextmanager
def removing(folder: Path) -> Iterator[None]:
    """While what is no longer needed goes: where that fails, say so; what was saved is saved, and the next save tries again."""
    try:
        yield
    except (OSError, ObjectStoreError) as error:
        log.warning_once("%s could not be removed (%s); the other checkpoints are intact", folder, error)


def write_forced(path: Path, data: bytes, mode: str = "wb") -> None:
    """Write a file, or ("ab") add to it, and force that to the disk."""
    with open(path, mode) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Force the folder's entries to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _exchange(new: Path, final: Path) -> None:
    """Let the two folders swap names in one step; where the system cannot, the old one steps aside first."""
    if sys.platform == "linux":
        swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if swap is not None and swap(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(final), _RENAME_EXCHANGE) == 0:
            return
    aside = final.parent / f"{_REPLACED}{final.name}"
    if aside.exists():
        DiskStore(aside).remove()
    os.rename(final, aside)
    os.rename(new, final)
    sync_folder(final.parent)
    os.rename(aside, new)


def _remove_tree(folder: Path) -> None:
    """A folder, or the link to one: where it leads stays."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def _is_litter(path: Path) -> bool:
    if not path.name.startswith(_REPLACED):
        return True
    final = path.parent / path.name.removeprefix(_REPLACED)
    return (final / MANIFEST).is_file()  # else it is the only one there is
