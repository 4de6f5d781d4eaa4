"""Local file cache for decompressed shards and for blocks of remote shards. All processes of a machine share it.

Each cached file, called a copy, is written once, under a lock, and renamed when it is complete. When the copies exceed
the limit, those that were used least recently are removed. A process that has opened a removed copy can still read it.
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headway.common.atomic import open_replacement
from headway.errors import DataError
from headway.language_data.shards.retry import RetryPolicy
from headway.language_data.shards.storage import LocalFile, RangeReader

_SUFFIX = ".copy"
_POLL_SECONDS = 0.05
_CHUNK_BYTES = 2**22


class LocalCopies:
    """Folder that caches decompressed shards and blocks of remote shards as local files.

    Args:
        folder: Folder of the cached files. It is created if necessary.
        max_bytes: Limit on the total size of the cached files, in bytes. A single file may exceed it.
        policy: Retry policy, whose `limit` also bounds the wait for another process that writes the same file.
    """

    def __init__(self, folder: Path, max_bytes: int, policy: RetryPolicy) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._policy = policy

    def open(self, key: str, write: Callable[[Any], None]) -> LocalFile:
        """Open the cached file with this name. If it does not exist, write it first.

        After a file is written, the least recently used ones are removed until the limit is met.

        Args:
            key: Name of the cached file, without its suffix.
            write: Function that writes the content to a binary file object. Its errors are passed on.

        Raises:
            DataError: If another process has been writing the file for longer than the policy's `limit`.
        """
        path = self._folder / f"{key}{_SUFFIX}"
        while True:
            try:
                local_file = LocalFile(str(path))
                os.utime(path)  # marks it as recently used
                return local_file
            except FileNotFoundError:
                pass  # not written yet, or another process has just removed it
            with lock_file(path.with_suffix(".lock"), self._policy.limit, str(path)):
                if not path.exists():
                    with open_replacement(path, has_other_writers=True) as staged, staged.open("wb") as file:
                        write(file)
                    self._evict_files(path)

    def _evict_files(self, newest: Path) -> None:
        """Remove the least recently used files, except `newest`, until the total size is within the limit."""
        files = []
        for path in self._folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
        total_bytes = sum(num_bytes for _, num_bytes, _ in files)
        for _, num_bytes, path in sorted(files):
            if total_bytes <= self._max_bytes:
                return
            if path != newest:
                path.unlink(missing_ok=True)
                path.with_suffix(".lock").unlink(missing_ok=True)
                total_bytes -= num_bytes


class CachedRanges:
    """Reader of byte ranges of a remote file. Each range that it reads is cached in a local file.

    Args:
        remote: Reader of the remote file.
        copies: Folder of the cached files.
        key: Prefix for the names of the cached ranges.
    """

    def __init__(self, remote: RangeReader, copies: LocalCopies, key: str) -> None:
        self._remote = remote
        self._copies = copies
        self._key = key

    def read_range(self, offset: int, num_bytes: int) -> memoryview:
        """Return `num_bytes` bytes of the remote file from `offset` on, from the local copy if it exists.

        The result is shorter only at the end of the file.
        """

        def write_range(file: Any) -> None:
            file.write(self._remote.read_range(offset, num_bytes))

        return self._copies.open(f"{self._key}-{offset}-{num_bytes}", write_range).read_range(0, num_bytes)

    def close(self) -> None:
        """Close the reader of the remote file."""
        self._remote.close()


@contextlib.contextmanager
def lock_file(path: Path, limit: float, description: str) -> Iterator[None]:
    """Hold an exclusive lock on a file during a `with` block. The operating system releases it if the process dies.

    Args:
        path: Lock file. It is created if necessary.
        limit: Seconds to wait for another process that holds the lock.
        description: Description of what the lock protects, for messages.

    Raises:
        DataError: If another process holds the lock for longer than `limit`.
        OSError: If the file system does not support locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() - start > limit:
                    raise DataError(
                        f"another process has been writing {description} for {limit:g} s; look at that process"
                    ) from error
                time.sleep(_POLL_SECONDS)
        yield


def copy_stream(source: Any, target: Any) -> None:
    """Copy all bytes of one binary file object to another."""
    shutil.copyfileobj(source, target, _CHUNK_BYTES)
