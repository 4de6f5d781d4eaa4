"""Folder in shared memory whose contents outlive the workers and exist as long as the launcher's agent.

The agent holds a lock on the folder (`flock`), which the kernel releases when the agent ends. If an agent is killed,
its folder remains. The next agent of the user on this machine finds the folder unlocked and removes it.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/dev/shm")

_PREFIX = "headway-memory-"


class SharedMemory:
    """Folder in shared memory that only this user can enter, locked by the agent until the run ends.

    The constructor removes this user's folders that were left by killed agents.

    Args:
        root: Existing folder of an in-memory file system, in which the folder is created. Default: /dev/shm.

    Attributes:
        folder: Path of the folder. Empty if the system has no shared memory.
    """

    def __init__(self, root: Path = _ROOT) -> None:
        self.folder = ""
        self._lock = -1  # file descriptor of the folder, which holds the lock
        with suppress(OSError):
            for leftover in root.glob(f"{_PREFIX}*"):
                _remove_leftover(leftover)
            while not self.folder:
                new_folder = tempfile.mkdtemp(prefix=_PREFIX, dir=root)
                self._lock = os.open(new_folder, os.O_RDONLY)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if os.path.isdir(new_folder):  # otherwise another agent has just removed it as a leftover
                    self.folder = new_folder

    def remove(self) -> None:
        """Remove the folder and free its memory at the end of the run."""
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)
            self.folder = ""


def _remove_leftover(folder: Path) -> None:
    """Remove a folder of this user that no agent has locked."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_uid == os.getuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises an OSError if an agent holds the lock
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
