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
        self._position = 0

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
        """Move to a byte offset and return the new offset, counted from the start of the file.

        Args:
            offset: Byte offset relative to the origin that `whence` selects.
            whence: `io.SEEK_SET` (start of the file), `io.SEEK_CUR` (current offset) or `io.SEEK_END` (end of the file).
        """
        origins = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._num_bytes}
        self._position = origins[whence] + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` from the current offset and return the number of bytes read."""
        count = self.read_at(self._position, memoryview(buffer).cast("B"))
        self._position += count
        return count
