"""Checkpoints as folders on a disk: staging, commit by one rename, and removal.

At any moment, a reader finds a complete checkpoint or none. To remove a checkpoint, its folder is renamed first, and
then its files are removed. Files left by interrupted saves have names that begin with a dot. The next save removes
them.
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

from headway.common.atomic import open_replacement
from headway.common.untrusted import open_regular_file
from headway.core.checkpoint.format.entries import WrittenFile
from headway.core.checkpoint.format.manifest import MANIFEST, Manifest, read_manifest
from headway.core.checkpoint.stores.folder_lock import FolderLock
from headway.errors import CheckpointError, ObjectStoreError
from headway.log import get_logger

log = get_logger(__name__)

LATEST = "latest"
"""Name of a file next to the checkpoints that contains the name of the newest one, for users and scripts.

Headway does not read the file.
"""
_STAGED, _REMOVED, _REPLACED = ".staging-", ".removing-", ".replaced-"
"""Prefixes of folder names: staging directories, checkpoints that are being removed, and those moved aside."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Constants of Linux's `renameat2`: relative paths refer to the working directory; the two names are exchanged."""


class DiskStore:
    """Checkpoint store in a local or shared file system: one checkpoint, or a directory of checkpoints.

    Args:
        folder: Directory of the checkpoint or checkpoints.

    Attributes:
        poll_seconds: Seconds between two checks for files that other ranks write.
        needs_lock: Whether saves to a folder that the caller names, instead of an automatically named one, need a lock.
            False, because a commit is a rename: a reader always finds the complete checkpoint of one run.
        verifies_on_read: Whether readers compare the bytes with their hashes as they read them, in a single pass.
    """

    poll_seconds = 0.005
    needs_lock = False
    verifies_on_read = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def check_name(self) -> None:
        """Do nothing, because any folder can be a checkpoint on a disk. Object stores refuse some names."""

    def check_target(self) -> None:
        """Raise `CheckpointError` if a save to this folder would overwrite anything other than a checkpoint.

        Raises:
            CheckpointError: If the path is a file, or a folder with other content.
        """
        final = self.folder
        if final.is_dir():
            if not (final / MANIFEST).exists() and any(final.iterdir()):
                raise CheckpointError(
                    f"{final} contains files, but no checkpoint of Headway. The save would replace the whole folder, so give a new "
                    "one"
                )
        elif final.exists() or final.is_symlink():
            raise CheckpointError(f"{final} is not a folder; give the name of a folder for the checkpoint")

    def lock(self, run: str, start: str) -> FolderLock:
        """Lock the folder against saves of other runs, and return the lock.

        Args:
            run: ID of the run, as in `LockOwner`.
            start: ID of this launch of the run, as in `LockOwner`.

        Raises:
            CheckpointError: If another run holds the lock.
        """
        return FolderLock(self.folder, run, start)

    # ---------------------------------------------------------------- save

    def get_staging(self, nonce: str) -> Path:
        """Return the staging directory of a save, next to the checkpoint's folder.

        Args:
            nonce: Random name of the save, 16 hexadecimal digits.
        """
        return self.folder.parent / f"{_STAGED}{self.folder.name}-{nonce}"

    def remove_staging(self) -> None:
        """Remove this store's folder, which is the staging directory of a failed save.

        The directory is renamed first, so that ranks that are still writing cannot find it.

        Raises:
            OSError: If the directory does not exist or cannot be renamed. Errors of the removal itself are ignored.
        """
        # The name ends with the save's nonce of 16 digits. With another nonce, `remove_leftovers` still finds the directory.
        aside = self.folder.with_name(f"{self.folder.name[:-16]}{secrets.token_hex(8)}")
        os.rename(self.folder, aside)
        shutil.rmtree(aside, ignore_errors=True)

    def commit(self, staging: Path, manifest: Manifest, ensure_locked: Callable[[], None]) -> None:
        """Commit the files of the staging directory as a checkpoint.

        The manifest is written, and everything is flushed to the disk with fsync. Then the directory is renamed once,
        and the rename is flushed too. An existing checkpoint is exchanged for the new one in one atomic step, if the
        system supports that. If flushing the rename fails, the rename is undone, so that a failed save leaves
        everything unchanged.

        Args:
            staging: Staging directory with the files.
            manifest: Manifest that lists the files.
            ensure_locked: Function that raises `CheckpointError` if another run has taken the lock. It is called just before
                the rename. This process might have been suspended, and that run might have saved under the same name.

        Raises:
            OSError: If the disk is full or the folder is not writable. An earlier checkpoint in the folder is
                unchanged.
            CheckpointError: If the manifest cannot be written as JSON, a load would refuse it, or another run has
                taken the lock.
        """
        final, data = self.folder, manifest.encode()
        manifest.read_back()  # an unreadable manifest must not replace a readable one
        write_and_sync(staging / MANIFEST, data)
        sync_folder(staging)
        ensure_locked()
        replaces_checkpoint = (final / MANIFEST).exists()
        if replaces_checkpoint:
            _exchange_folders(staging, final)
        else:
            os.rename(staging, final)  # `final` does not exist, or is an empty folder
        try:
            sync_folder(final.parent)
        except OSError:
            with contextlib.suppress(OSError):  # report the first error, not this one
                if replaces_checkpoint:
                    _exchange_folders(staging, final)
                else:
                    os.rename(final, staging)
            raise
        if replaces_checkpoint:
            with warn_of_failed_removal(staging):
                DiskStore(staging).remove()

    def point_latest(self) -> None:
        """Write the checkpoint's name to the file `latest` next to it.

        Do nothing if a checkpoint, or a link to one, is itself named `latest`. The file is replaced by a rename that is not
        flushed to the disk here, so after a power failure it may still contain the former name. `remove` flushes the
        rename before it deletes any checkpoint.
        """
        pointer = self.folder.parent / LATEST
        if (pointer / MANIFEST).exists():
            return
        with open_replacement(pointer) as staged:
            write_and_sync(staged, os.fsencode(f"{self.folder.name}\n"))

    # ---------------------------------------------------------------- find

    def find_folder(self) -> Path:
        """Return the folder that holds the checkpoint of this store.

        The checkpoint has another name if a process was killed between two renames that replace it. Two renames are
        used on systems that cannot exchange two names in one step. The first one moves the old checkpoint aside.

        Raises:
            CheckpointError: If there is no checkpoint.
        """
        path = self.folder
        if os.path.isfile(path / MANIFEST):
            return path
        aside = path.parent / f"{_REPLACED}{path.name}"
        if os.path.isfile(aside / MANIFEST):  # a process was killed between two renames
            return aside
        read_manifest(path)
        return path

    def get_content_folder(self) -> Path:
        """Return the folder that holds the checkpoint's files."""
        return self.folder

    def read_identity(self) -> tuple[int, int]:
        """Return the inode number and modification time (ns) of the manifest. They change with each commit.

        Raises:
            OSError: If there is no manifest.
        """
        status = (self.folder / MANIFEST).stat()
        return status.st_ino, status.st_mtime_ns

    def find_absent(self, manifest: Manifest) -> str | None:
        """Return an error message about the first file that is missing or has a wrong length, or None if there is none.

        The bytes of the files are not read.
        """
        try:
            for written in manifest.files.values():
                check_file(self.folder / written.name, written)
        except CheckpointError as error:
            return str(error)
        return None

    def prepare_download(self, manifest: Manifest) -> None:
        """Return None, because the files of a checkpoint on a disk need not be downloaded."""

    # ---------------------------------------------------------------- remove

    def remove(self) -> None:
        """Remove the checkpoint. Its folder is renamed first, so that no reader finds an incomplete checkpoint.

        A folder whose name begins with a dot is removed without a rename, because readers ignore it.

        Raises:
            OSError: If the folder cannot be renamed or removed.
        """
        folder = to_remove = self.folder
        if not folder.name.startswith("."):
            to_remove = folder.parent / f"{_REMOVED}{folder.name}"
            if to_remove.exists() or to_remove.is_symlink():
                _remove_tree(to_remove)
            os.rename(folder, to_remove)
        try:
            if to_remove is not folder:  # otherwise, after a power failure, the old name could exist without the files
                sync_folder(folder.parent)
            _remove_tree(to_remove)
        except KeyboardInterrupt:  # a second Ctrl-C leaves the rest to the next save
            shutil.rmtree(to_remove, ignore_errors=True)
            raise

    def remove_leftovers(self, name: str | None = None) -> list[Path]:
        """Remove files that interrupted saves have left in this folder, and return their paths.

        If a removal fails, only a warning is logged. A checkpoint that was moved aside is kept if its replacement has
        not been committed. Do not call this method while one of the named checkpoints is being saved.

        Args:
            name: Name of the checkpoint whose leftover files are removed. Default: None, those of all checkpoints.
        """
        parent = self.folder
        if not parent.is_dir():
            return []
        name_pattern = ".+" if name is None else re.escape(name)
        pattern = re.compile(rf"{_STAGED}{name_pattern}-[0-9a-f]{{16}}|({_REMOVED}|{_REPLACED}){name_pattern}")
        leftovers = [path for path in parent.iterdir() if pattern.fullmatch(path.name) and _can_be_removed(path)]
        for path in leftovers:
            with warn_of_failed_removal(path):
                DiskStore(path).remove()
        (parent / f".{LATEST}.tmp").unlink(missing_ok=True)
        return leftovers


@contextlib.contextmanager
def warn_of_failed_removal(folder: Path) -> Iterator[None]:
    """Return a context manager that logs a warning if a removal within it fails, instead of raising the error.

    A failed removal does not affect the saved checkpoint. The next save removes the remaining files.

    Args:
        folder: Folder that is removed, for the warning.
    """
    try:
        yield
    except (OSError, ObjectStoreError) as error:
        log.warning_once("%s could not be removed (%s); the other checkpoints are intact", folder, error)


def write_and_sync(path: Path, data: bytes, mode: str = "wb") -> None:
    """Write a file and flush it to the disk with fsync.

    Args:
        path: File to write.
        data: Bytes to write.
        mode: Mode of `open`. "ab" appends the data. Default: "wb".
    """
    with open(path, mode) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's directory entries to the disk with fsync."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _exchange_folders(new: Path, final: Path) -> None:
    """Swap the names of two folders.

    On Linux this is one atomic step. If the system cannot do that, the old folder is renamed to another name first.

    Args:
        new: Folder with the new checkpoint.
        final: Folder with the old checkpoint.
    """
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
    """Remove a folder. If it is a symbolic link, only the link is removed, not its target."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def _can_be_removed(path: Path) -> bool:
    """Whether a leftover is not needed. A checkpoint that was moved aside is needed until its replacement exists."""
    if not path.name.startswith(_REPLACED):
        return True
    final = path.parent / path.name.removeprefix(_REPLACED)
    return (final / MANIFEST).is_file()  # otherwise the replaced checkpoint is the only one


def check_file(path: Path, written: WrittenFile) -> None:
    """Raise `CheckpointError` unless the path is a regular file with the length that the manifest lists.

    Args:
        path: File to check.
        written: The manifest's entry of the file.

    Raises:
        CheckpointError: If the path is not a regular file, or has another length.
    """
    with open_regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size
    if size != written.num_bytes:
        raise CheckpointError(
            f"{path} has {size} bytes; {written.num_bytes} were written. It is truncated, or another file"
        )
