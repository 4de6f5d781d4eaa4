"""The memory that Linux lets this process's control group have (a container, a SLURM job, a systemd slice), version 1 or 2."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headway.common.text import format_bytes

# Version 1 writes a huge number where there is no limit.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class ControlGroup:
    """One group, read again at each question; all in bytes.

    Attributes:
        folder: where its control files lie.
        is_unified: version 2.
    """

    folder: Path
    is_unified: bool

    @property
    def limit(self) -> int | None:
        """What it may hold; None without a limit."""
        found = self._number("memory.max" if self.is_unified else "memory.limit_in_bytes")
        return None if found is None or found >= _NO_LIMIT else found

    @property
    def held(self) -> int | None:
        """What it holds, page cache counted in; None where the kernel does not say."""
        return self._number("memory.current" if self.is_unified else "memory.usage_in_bytes")

    @property
    def peak(self) -> int | None:
        """The most it ever held; None where the kernel does not say."""
        return self._number("memory.peak" if self.is_unified else "memory.max_usage_in_bytes")

    @property
    def reclaimable(self) -> int:
        """Page cache that the kernel gives back when asked."""
        # Version 1 counts the children's in the total only.
        return self._count("memory.stat", "inactive_file" if self.is_unified else "total_inactive_file") or 0

    @property
    def num_kills(self) -> int | None:
        """Processes of it that the out-of-memory killer has ended; None where the kernel does not say."""
        return self._count("memory.events" if self.is_unified else "memory.oom_control", "oom_kill")

    @property
    def room(self) -> int | None:
        """What it may still take; None without a limit."""
        limit, held = self.limit, self.held
        return None if limit is None or held is None else max(0, limit - held + self.reclaimable)

    def _number(self, name: str) -> int | None:
        text = _text(self.folder / name).strip()
        return int(text) if text.isdecimal() else None

    def _count(self, name: str, key: str) -> int | None:
        found = re.search(rf"^{key} (\d+)", _text(self.folder / name), re.MULTILINE)
        return int(found[1]) if found else None


def control_groups(root: Path = Path("/")) -> Iterator[ControlGroup]:
    """This process's group that accounts for memory, then its parents; none where there are no control groups.

    Args:
        root: where `proc` and `sys` lie.
    """
    mounted = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        is_unified = (number, controllers) == ("0", "")
        if not is_unified and "memory" not in controllers.split(","):
            continue
        base = mounted if is_unified else mounted / "memory"
        # Inside a container the path may be the host's, which is not mounted; the base is then the group itself.
        folder = base / path.lstrip("/")
        while folder != base.parent:
            if folder.is_dir():
                yield ControlGroup(folder, is_unified)
            folder = folder.parent


class MemoryWatch:
    """The kernel's out-of-memory counters, read before and after."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._group = next((group for group in control_groups(root) if group.num_kills is not None), None)
        self._before = self._num_kills()

    def verdict(self) -> str:
        """What the counters say since this object was made; empty where they say nothing."""
        kills = self._num_kills() - self._before
        if kills <= 0:
            return ""
        text = "the kernel's out-of-memory killer sent it, as the host's memory ran out"
        peak, limit = (None, None) if self._group is None else (self._group.peak, self._group.limit)
        if peak is not None and limit is not None:
            text += f" (this container's peak: {format_bytes(peak)} of {format_bytes(limit)})"
        elif peak is not None:
            text += f" (peak: {format_bytes(peak)})"
        return text + "; use fewer processes or data-loading workers, or a smaller batch"

    def _num_kills(self) -> int:
        counters = _text(self._root / "proc/vmstat")
        on_the_host = re.search(r"^oom_kill (\d+)", counters, re.MULTILINE)
        in_the_group = None if self._group is None else self._group.num_kills
        return max(int(on_the_host[1]) if on_the_host else 0, in_the_group or 0)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
