"""Seekable binary files whose content is read by byte ranges, for libraries that read from file objects."""

import io
from abc import abstractmethod
from typing import Any


class RangeFile(io.RawIOBase):
    """Base class of read-only file objects that are read by byte ranges.

    Args:
        num_bytes: Size of the file in bytes.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._at = 0

    @abstractmethod
    def read_at(self, offset: int, view: memoryview) -> int:
        """Fill `view` with the bytes of the file that start at `offset`.

        Args:
            offset: Byte offset at which to start.
            view: Buffer of bytes. It can be longer than the rest of the file.

        Returns:
            Number of bytes read. It is less than the length of `view` only at the end of the file.
        """

    def readable(self) -> bool:
        """Return True, because the file can be read."""
        return True

    def seekable(self) -> bool:
        """Return True, because reading can start at any byte offset."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to a byte offset and return the new offset. `whence` has the same meaning as in `io.IOBase.seek`."""
        self._at = offset + (0, self._at, self._num_bytes)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` from the current offset and return the number of bytes read."""
        count = self.read_at(self._at, memoryview(buffer).cast("B"))
        self._at += count
        return count
