"""Detect processes that were killed by the kernel's out-of-memory killer."""

import re
from pathlib import Path

from headway.common.control_groups import list_control_groups
from headway.common.system_files import read_system_file
from headway.common.text import format_bytes


class MemoryWatch:
    """Detector of kills by the kernel's out-of-memory killer since this object was created.

    Args:
        root: Folder that contains the folders `proc` and `sys`. Default: "/".
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._group = next((group for group in list_control_groups(root) if group.num_kills is not None), None)
        self._before = self._count_kills()

    def describe_kills(self) -> str:
        """Return a description of the out-of-memory kills since this object was created. Empty if there were none.

        The description continues a sentence about a rank that SIGKILL has ended. Kills of any process on this host or
        in this process's control group count.
        """
        kills = self._count_kills() - self._before
        if kills <= 0:
            return ""
        text = "the kernel's out-of-memory killer sent it, as the host's memory ran out"
        peak, limit = (None, None) if self._group is None else (self._group.peak, self._group.limit)
        if peak is not None and limit is not None:
            text += f" (this container's peak: {format_bytes(peak)} of {format_bytes(limit)})"
        elif peak is not None:
            text += f" (peak: {format_bytes(peak)})"
        return text + "; use fewer processes or data-loading workers, or a smaller batch"

    def _count_kills(self) -> int:
        """Return how many processes the kernel's out-of-memory killer has ended, on the host or in this control group."""
        counters = read_system_file(self._root / "proc/vmstat")
        on_the_host = re.search(r"^oom_kill (\d+)", counters, re.MULTILINE)
        in_the_group = None if self._group is None else self._group.num_kills
        return max(int(on_the_host[1]) if on_the_host else 0, in_the_group or 0)
