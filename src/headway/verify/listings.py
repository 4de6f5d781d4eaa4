"""Reversed folder listings, which reveal scripts whose data depends on the order of files in a folder.

`os.listdir` and `os.scandir` return files in an order that depends on the file system and on the order in which the
files were written. This order rarely changes between two runs on one machine, but can differ on another machine. In the
repeated run of `headway verify`, the user's code therefore gets the reverse order when it lists a folder. Both
functions are patched only in that run's process.
"""

import os
from collections.abc import Iterator
from typing import Any

from headway.common import scope
from headway.common.callsite import Frame, is_user_file, walk_stack
from headway.verify.request import read_request

_LISTING_FILES = ("glob.py", "pathlib.py", "_local.py", "fnmatch.py", "os.py", "__init__.py", "_abc.py")
"""Ends of the paths of Python's source files that list folders for the user's code.

pathlib consists of other files in newer versions of Python.
"""


class ReversedListings:
    """Replacement for `os.listdir` and `os.scandir` that returns a folder's files in reverse order to the user's code.

    Attributes:
        lines: Lines of the user's code that got several files in reverse order, as keys in the order of the first call.
    """

    def __init__(self) -> None:
        self.lines: dict[str, None] = {}

    def reverse_listings(self) -> None:
        """Replace `os.listdir` and `os.scandir` in this process by versions that reverse the order of the entries.

        Only calls from the user's code are affected. A script whose result depends on the order then differs.
        """
        listdir, scandir = os.listdir, os.scandir

        def list_reversed_folder(*args: Any) -> list[Any]:
            names = listdir(*args)
            return names[::-1] if self._is_user_call(len(names)) else names

        def scan_reversed_folder(*args: Any) -> Any:
            with scandir(*args) as iterator:
                entries = list(iterator)
            return _ReversedEntries(entries[::-1] if self._is_user_call(len(entries)) else entries)

        os.listdir = list_reversed_folder  # type: ignore[assignment]
        os.scandir = scan_reversed_folder  # type: ignore[assignment]

    def _is_user_call(self, num_files: int) -> bool:
        """Whether the user's code lists the folder, directly or through Python's glob or pathlib.

        If so, the calling line of the user's code is recorded, provided that the folder has at least two entries.

        Args:
            num_files: Number of entries of the folder.
        """
        for frame in walk_stack():
            name = frame.f_code.co_filename
            if name == __file__ or (not is_user_file(name) and name.endswith(_LISTING_FILES)):
                continue
            is_own = is_user_file(name)
            if is_own and num_files > 1:
                self.lines[str(Frame.from_frame(frame))] = None
            return is_own
        return False


class _ReversedEntries:
    """Replacement for the iterator that `os.scandir` returns.

    Args:
        entries: Entries of the folder.
    """

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> "_ReversedEntries":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing. The folder was already closed after its entries had been read."""


def reverse_listings_if_asked() -> None:
    """Reverse folder listings in this process if its `RunRequest` asks for it."""
    request = read_request()
    if request is not None and request.reverses_listings:
        scope.get_or_create(ReversedListings).reverse_listings()


def list_reversed_lines() -> list[str]:
    """Return the lines of the user's code that got the files of a folder in reverse order."""
    return list(scope.get_or_create(ReversedListings).lines)
