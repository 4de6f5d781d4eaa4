"""Memory limits of this process's Linux control group, version 1 or 2, such as a container or a SLURM job."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headway.common.system_files import read_system_file

_NO_LIMIT = 1 << 60
"""Smallest reported limit, in bytes, that is taken to mean "no limit".

If there is no limit, version 1 reports a huge number.
"""


@dataclass(frozen=True)
class ControlGroup:
    """Linux control group (cgroup), with its memory limit and memory use.

    The values are read from the kernel at each access.

    Attributes:
        folder: Folder of the group's control files.
        is_unified: Whether the group uses version 2 of Linux control groups (cgroup v2).
    """

    folder: Path
    is_unified: bool

    @property
    def limit(self) -> int | None:
        """Memory limit in bytes. None if unlimited, or if the kernel does not report it."""
        limit = self._read_number("memory.max" if self.is_unified else "memory.limit_in_bytes")
        return None if limit is None or limit >= _NO_LIMIT else limit

    @property
    def used(self) -> int | None:
        """Memory in use in bytes, including the page cache. None if the kernel does not report it."""
        return self._read_number("memory.current" if self.is_unified else "memory.usage_in_bytes")

    @property
    def peak(self) -> int | None:
        """Peak memory in bytes. None if the kernel does not report it."""
        return self._read_number("memory.peak" if self.is_unified else "memory.max_usage_in_bytes")

    @property
    def reclaimable(self) -> int:
        """Bytes of page cache that the kernel frees when processes need memory. 0 if the kernel does not report it."""
        # In version 1, only the `total_` values include child groups.
        return self._read_count("memory.stat", "inactive_file" if self.is_unified else "total_inactive_file") or 0

    @property
    def num_kills(self) -> int | None:
        """Number of the group's processes that the out-of-memory killer has killed.

        None if the kernel does not report it.
        """
        return self._read_count("memory.events" if self.is_unified else "memory.oom_control", "oom_kill")

    @property
    def available_bytes(self) -> int | None:
        """Bytes that can still be allocated: the limit minus the memory in use, plus the page cache that can be freed.

        None if unlimited, or if the kernel does not report limit or use.
        """
        limit, used = self.limit, self.used
        return None if limit is None or used is None else max(0, limit - used + self.reclaimable)

    def _read_number(self, name: str) -> int | None:
        """Return the number in a file of the control group, or None if the file is missing or says "max"."""
        text = read_system_file(self.folder / name).strip()
        return int(text) if text.isdecimal() else None

    def _read_count(self, name: str, key: str) -> int | None:
        """Return a count from a file of the control group that has a line for each key, or None if the line is missing."""
        match = re.search(rf"^{key} (\d+)", read_system_file(self.folder / name), re.MULTILINE)
        return int(match[1]) if match else None


def list_control_groups(root: Path = Path("/")) -> Iterator[ControlGroup]:
    """Yield this process's control group for memory, then its parents. Yield nothing if there are no control groups.

    Args:
        root: Folder that contains the folders `proc` and `sys`. Default: "/".
    """
    mount_point = root / "sys/fs/cgroup"
    for line in read_system_file(root / "proc/self/cgroup").splitlines():
        # Each line is "hierarchy:controllers:path". Version 2 has the single line "0::path".
        fields = line.split(":", 2)
        if len(fields) < 3:
            continue
        hierarchy, controllers, path = fields
        is_unified = hierarchy == "0" and not controllers
        if not is_unified and "memory" not in controllers.split(","):
            continue
        base = mount_point if is_unified else mount_point / "memory"
        # Inside a container, the path can be the host's, which is not mounted. Then `base` is the group itself.
        folder = base / path.lstrip("/")
        while folder != base.parent:
            if folder.is_dir():
                yield ControlGroup(folder, is_unified)
            folder = folder.parent
