"""Interface of checkpoint stores, which saving and loading use for both disks and object stores."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from headway.core.checkpoint.format.manifest import Manifest
from headway.core.checkpoint.lock import CheckpointLock


class CheckpointDownload(Protocol):
    """Local folder into which parts of a checkpoint's files are downloaded. Each part is compared with its hash.

    Attributes:
        folder: Path of the local folder.
    """

    folder: Path

    def download_header(self, file: str) -> Path:
        """Download the safetensors header of a file, and return the path of the local file.

        Args:
            file: Name of the file, relative to the checkpoint's folder.
        """

    def download_ranges(self, ranges: Mapping[str, Iterable[tuple[int, int]]]) -> None:
        """Download the given byte ranges, and compare them with their hashes.

        Each range is extended to whole pieces. A piece is the part of a file that one hash covers.

        Args:
            ranges: Byte ranges by file name, as pairs of (begin, end). The end is exclusive.

        Raises:
            CheckpointDamaged: If a piece differs from its hash.
            CheckpointError: If a file is missing or cannot be read.
        """

    def verify(self) -> None:
        """Download every byte of the checkpoint and compare it with the hashes. The bytes are not kept.

        Raises:
            CheckpointDamaged: If a piece of a file differs from its hash.
            CheckpointError: If a file is missing or cannot be read.
        """


class CheckpointStore(Protocol):
    """Store of one checkpoint, or of a directory of checkpoints. `stores.disk.DiskStore` documents the methods.

    Attributes:
        folder: Path or URL of the checkpoint, or of the directory of checkpoints.
        poll_seconds: Seconds between two checks for files that other ranks write.
        needs_lock: Whether saves to a folder that the caller names, instead of an automatically named one, need a lock.
        verifies_on_read: Whether the bytes are compared with their hashes as they are read, so that no separate
            verification is needed.
    """

    folder: Any
    poll_seconds: float
    needs_lock: bool
    verifies_on_read: bool

    def check_name(self) -> None:
        """Raise `ConfigError` if a checkpoint in this store cannot have this path."""

    def check_target(self) -> None:
        """Raise `CheckpointError` if a save would overwrite anything other than a checkpoint."""

    def lock(self, run: str, start: str) -> CheckpointLock:
        """Lock the checkpoint directory against saves of other runs, and return the lock.

        Args:
            run: ID of the run, as in `LockOwner`.
            start: ID of this launch of the run, as in `LockOwner`.

        Raises:
            CheckpointError: If another run holds the lock.
        """

    def get_staging(self, nonce: str) -> Path:
        """Return the staging directory or prefix that holds the files of a save until the commit.

        Args:
            nonce: Random name of the save, 16 hexadecimal digits.
        """

    def remove_staging(self) -> None:
        """Remove this store's folder, which is the staging directory or prefix of a failed save."""

    def commit(self, staging: Path, manifest: Manifest, ensure_locked: Callable[[], None]) -> None:
        """Commit the files of the staging directory or prefix as a checkpoint.

        Args:
            staging: Staging directory or prefix with the files.
            manifest: Manifest that lists the files.
            ensure_locked: Function that raises `CheckpointError` if another run has taken the lock. The store calls it just
                before the commit.

        Raises:
            OSError, CheckpointError: If the commit fails. An earlier checkpoint in the folder is then unchanged.
        """

    def point_latest(self) -> None:
        """Write the checkpoint's name to the file `latest` next to it."""

    def find_folder(self) -> Path:
        """Return the folder or prefix that holds the checkpoint of this store.

        Raises:
            CheckpointError: If there is no checkpoint.
        """

    def get_content_folder(self) -> Path:
        """Return the folder or prefix that holds the checkpoint's files."""

    def read_identity(self) -> tuple[int, int]:
        """Return a pair of numbers that identifies the stored checkpoint.

        The pair changes if another checkpoint is committed under the same name.
        """

    def find_absent(self, manifest: Manifest) -> str | None:
        """Return an error message about the first file that is missing or has a wrong length, or None if there is none.

        The bytes of the files are not read.
        """

    def prepare_download(self, manifest: Manifest) -> CheckpointDownload | None:
        """Return a local folder into which the files can be downloaded, or None if no download is needed."""

    def remove(self) -> None:
        """Remove the checkpoint."""

    def remove_leftovers(self, name: str | None = None) -> list[Path]:
        """Remove the files that interrupted saves have left, and return the removed paths.

        Args:
            name: Name of the checkpoint whose leftover files are removed. Default: None, those of all checkpoints.
        """
