"""`EscapeWatch`: records which files a script writes outside of the scratch folder, with a Python audit hook."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

_WRITING = frozenset("wax+")
_IGNORED = ("__pycache__", ".cache", ".triton", ".config", "torchinductor", ".pyc", ".lock", "/.nv/")


class EscapeWatch:
    """Record of files that this process opens for writing, creates, renames or removes outside of a folder.

    Caches and system files are not recorded.

    Args:
        scratch: Folder whose files are not recorded.
    """

    def __init__(self, scratch: Path) -> None:
        folders = {str(scratch), os.path.realpath(scratch), *_list_system_folders()}
        self._kept = (*(f"{folder.rstrip('/')}/" for folder in folders), f"{tempfile.gettempdir()}/torch")
        self._found: dict[str, None] = {}
        sys.addaudithook(self._handle_event)

    def list_files(self) -> list[str]:
        """Return the paths of the recorded files, in order of the first change."""
        return list(self._found)

    def _handle_event(self, event: str, args: tuple[Any, ...]) -> None:
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
            whole = os.path.join(os.path.realpath(folder), name)
            whole = os.path.realpath(whole) if follows_links else whole
        except (TypeError, ValueError, OSError):
            return
        if f"{whole}/".startswith(self._kept) or any(each in whole for each in _IGNORED) or len(self._found) > 50:
            return
        self._found[whole] = None


def _is_writing(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return bool(_WRITING & set(mode))
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _list_system_folders() -> list[str]:
    home = os.path.expanduser("~")
    return ["/dev", "/proc", "/sys", os.path.join(home, ".cache")]


def format_escapes(found: list[list[str]], most: int = 10) -> list[str]:
    """Return the first paths that the processes of all runs changed outside of the scratch folder, without duplicates.

    Args:
        found: List of recorded paths of each process.
        most: Largest number of paths to return. Default: 10.
    """
    paths = list(dict.fromkeys(path for each in found for path in each))
    return paths[:most]
