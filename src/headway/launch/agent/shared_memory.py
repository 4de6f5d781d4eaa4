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
        root: Existing folder of an in-memory file system, in which the folder is created.

    Attributes:
        folder: Path of the folder. Empty if the system has no shared memory.
    """

    def __init__(self, root: Path = _ROOT) -> None:
        self.folder = ""
        self._lock = -1
        with suppress(OSError):
            for left in root.glob(f"{_PREFIX}*"):
                _remove_leftover(left)
            while not self.folder:
                made = tempfile.mkdtemp(prefix=_PREFIX, dir=root)
                self._lock = os.open(made, os.O_RDONLY)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if os.path.isdir(made):  # otherwise another agent has just removed it as a leftover
                    self.folder = made

    def remove(self) -> None:
        """Remove the folder and free its memory at the end of the run."""
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)
            self.folder = ""


def _remove_leftover(folder: Path) -> None:
    """Remove a folder of this user that no agent has locked."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(handle).st_uid == os.getuid():
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(handle)
