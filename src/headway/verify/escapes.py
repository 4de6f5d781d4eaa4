"""`EscapeWatch`: records which files a script writes outside of the scratch folder, with a Python audit hook."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

_WRITE_MODES = frozenset("wax+")
"""Letters in the mode of `open` that open a file for writing."""
_IGNORED_PARTS = ("__pycache__", ".cache", ".triton", ".config", "torchinductor", ".pyc", ".lock", "/.nv/")
"""Parts of paths of caches and locks, which are not recorded."""
_MOST_FILES = 50
"""Largest number of files that are recorded."""


class EscapeWatch:
    """Record of files that this process opens for writing, creates, renames or removes outside of a folder.

    Caches and system files are not recorded.

    Args:
        scratch: Folder whose files are not recorded.
    """

    def __init__(self, scratch: Path) -> None:
        folders = {str(scratch), os.path.realpath(scratch), *_list_system_folders()}
        self._ignored_prefixes = (*(f"{folder.rstrip('/')}/" for folder in folders), f"{tempfile.gettempdir()}/torch")
        self._files: dict[str, None] = {}  # a dict keeps the order
        sys.addaudithook(self._handle_event)

    def list_files(self) -> list[str]:
        """Return the paths of the recorded files, in order of the first change."""
        return list(self._files)

    def _handle_event(self, event: str, args: tuple[Any, ...]) -> None:
        """Record the path that an audit event of Python writes, creates, renames or deletes.

        Args:
            event: Name of the event, such as "open".
            args: Arguments of the event.
        """
        if event == "open":
            path, mode, flags = args
            if not isinstance(path, str | bytes) or not _is_writing(mode, flags):
                return
            self._record_path(path, follows_links=True)
        elif event in ("os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"):
            self._record_path(args[0])
        elif event == "os.rename":
            self._record_path(args[0])
            self._record_path(args[1])

    def _record_path(self, path: Any, *, follows_links: bool = False) -> None:
        """Record a path if it is outside of the scratch folder.

        The working directory of a run contains links to the user's files, so links are resolved.

        Args:
            path: Path from an audit event.
            follows_links: Whether the operation changes the target of a link, as opening does, and not the link itself.
                Default: False.
        """
        try:
            folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
            resolved = os.path.join(os.path.realpath(folder), name)
            resolved = os.path.realpath(resolved) if follows_links else resolved
        except (TypeError, ValueError, OSError):
            return
        is_ignored = f"{resolved}/".startswith(self._ignored_prefixes) or any(
            each in resolved for each in _IGNORED_PARTS
        )
        if not is_ignored and len(self._files) <= _MOST_FILES:
            self._files[resolved] = None


def _is_writing(mode: Any, flags: Any) -> bool:
    """Whether a file is opened for writing.

    Args:
        mode: Mode of `open`, such as "w". None if the file is opened by `os.open`.
        flags: Flags of `os.open`, which are used if there is no mode.
    """
    if isinstance(mode, str):
        return bool(_WRITE_MODES & set(mode))
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _list_system_folders() -> list[str]:
    """Return the folders whose changes are not reported: those of the system, and the user's cache."""
    home = os.path.expanduser("~")
    return ["/dev", "/proc", "/sys", os.path.join(home, ".cache")]


def select_escaped_files(files_by_process: list[list[str]], most: int = 10) -> list[str]:
    """Return the first paths that the processes of all runs changed outside of the scratch folder, without duplicates.

    Args:
        files_by_process: List of recorded paths of each process.
        most: Largest number of paths to return. Default: 10.
    """
    paths = list(dict.fromkeys(path for files in files_by_process for path in files))
    return paths[:most]
