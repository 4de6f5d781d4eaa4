"""A folder in shared memory that lives as long as the launcher's agent, so its contents outlive the workers.

The agent holds a lock on it (`flock`, which the kernel drops with its holder). An agent that was killed leaves its folder behind; the
next one that starts on the machine finds it without a holder, and removes it.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_ROOT = Path("/dev/shm")
_PREFIX = "headway-memory-"


class SharedMemory:
    """Makes the folder, which only this user can enter.

    Args:
        root: where; a file system without a disk.

    Attributes:
        folder: its path; "" where the system has no shared memory.
    """

    def __init__(self, root: Path = _ROOT) -> None:
        self.folder, self._lock = "", -1
        with contextlib.suppress(OSError):
            for left in root.glob(f"{_PREFIX}*"):
                _remove_left(left)
            while not self.folder:
                made = tempfile.mkdtemp(prefix=_PREFIX, dir=root)
                self._lock = os.open(made, os.O_RDONLY)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if os.path.isdir(made):  # else another agent has just taken it for one that was left
                    self.folder = made

    def remove(self) -> None:
        """The run is over: give the memory back."""
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)
            self.folder = ""


def _remove_left(folder: Path) -> None:
    """Remove a folder of this user's that no agent holds."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(handle).st_uid == os.getuid():
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(handle)
