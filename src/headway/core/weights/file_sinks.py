"""Targets for the bytes of a file that several threads write: a file on a disk, and an object store.

The descriptor of a file stays open from its first byte to its fsync. Linux reports a failed write only to
descriptors that were open at that time.
"""

import contextlib
import ctypes
import math
import os
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from headway.common.object_path import PART, ObjectPath
from headway.core.weights.ranged_file import RANGE
from headway.core.weights.safetensors_format import add_path_to_errors

_SYNC_FILE_RANGE_WRITE = 2
"""Flag of Linux's `sync_file_range`: start to write dirty pages, without waiting."""


class FileSink(Protocol):
    """Interface of the target to which the bytes of one file are written.

    Attributes:
        range_bytes: Number of bytes of a range. Only the last range of a file can be shorter.
        needs_single_block: Whether all bytes of a range must be written by one call of `write`.
    """

    range_bytes: int
    needs_single_block: bool

    def write(self, view: memoryview, offset: int) -> None:
        """Write bytes to the file, starting at an offset."""

    def end_range(self, start: int, num_bytes: int) -> None:
        """Handle a range whose bytes have all been written.

        Args:
            start: Offset of the range in the file.
            num_bytes: Length of the range.
        """

    def finish(self) -> None:
        """Complete the file. Called after its last range has been written."""

    def abort(self) -> None:
        """Release the file after an error."""


class DiskSink:
    """Target for the bytes of a file on a disk.

    Args:
        path: File to create or overwrite.
        syncs_to_disk: Whether `finish` flushes the file to the disk with fsync.
    """

    range_bytes = RANGE
    needs_single_block = False

    def __init__(self, path: Path, syncs_to_disk: bool) -> None:
        self._path = path
        self._syncs_to_disk = syncs_to_disk
        # The kernel lets one thread at a time write to a file. Others would spin on its lock instead of hashing.
        self._lock = threading.Lock()
        with add_path_to_errors(path):
            self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def write(self, view: memoryview, offset: int) -> None:
        """Write bytes to the file, starting at an offset.

        Raises:
            OSError: If the disk is full or not writable.
        """
        with add_path_to_errors(self._path), self._lock:
            while view:
                count = os.pwrite(self._handle, view, offset)
                view = view[count:]
                offset += count

    def end_range(self, start: int, num_bytes: int) -> None:
        """Start to flush a range from the page cache to the disk, so that the disk is not idle until `finish`."""
        flush = _find_sync_file_range() if self._syncs_to_disk else None
        if flush is not None:
            flush(self._handle, start, num_bytes, _SYNC_FILE_RANGE_WRITE)  # fsync reports errors

    def finish(self) -> None:
        """Close the file. If `syncs_to_disk` is set, flush it to the disk first.

        Raises:
            OSError: If the disk is full or failed.
        """
        with add_path_to_errors(self._path):
            if self._syncs_to_disk:
                os.fsync(self._handle)
            handle, self._handle = self._handle, -1
            os.close(handle)

    def abort(self) -> None:
        """Close the file after an error."""
        if self._handle >= 0:
            handle, self._handle = self._handle, -1
            with contextlib.suppress(OSError):  # the first error is the one to report
                os.close(handle)


@cache
def _find_sync_file_range() -> Callable[..., int] | None:
    """Return Linux's `sync_file_range`, or None on other systems.

    The function starts to write a range to the disk without waiting.
    """
    if sys.platform != "linux":
        return None
    function: Any = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function  # type: ignore[no-any-return]


class ObjectSink:
    """Target for the bytes of a file in an object store. Each range is one object, written by one request.

    Args:
        path: File to write.
        piece: Number of bytes that one hash of the file covers.
    """

    needs_single_block = True

    def __init__(self, path: ObjectPath, piece: int) -> None:
        self._path = path
        self.range_bytes = math.lcm(PART, piece)  # one part, unless tests make parts smaller

    def write(self, view: memoryview, offset: int) -> None:
        """Write the bytes of a complete range.

        Raises:
            ObjectStoreError: If the store does not accept the request.
        """
        for start in range(0, len(view), PART):
            self._path.client.put(self._path.make_part_key((offset + start) // PART), view[start : start + PART])

    def end_range(self, start: int, num_bytes: int) -> None:
        """Do nothing, because `write` has written the range as a complete object."""

    def finish(self) -> None:
        """Do nothing, because all objects are complete."""

    def abort(self) -> None:
        """Do nothing, because no request is open."""
