"""What this machine has, found without torch: visible accelerators, CPU cores, memory of its control group, the loopback.

Accelerators that a vendor's package adds to torch, found by what is installed; torch is asked in a process of its own.

Such a package tells torch about itself by an entry point of the group "torch.backends", which `import torch` loads.

The memory that Linux lets this process's control group have (a container, a SLURM job, a systemd slice), version 1 or 2.
"""

import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.common.optional import available
from headway.common.text import format_bytes

_GROUP = "[torch.backends]"

_QUESTION = """
import torch
found = torch.accelerator.current_accelerator(check_available=True)
if found is not None:
    print("headway:", found.type, torch.accelerator.device_count())
"""


def accelerator(environment: Mapping[str, str], folders: Iterable[str] | None = None) -> tuple[str, int] | None:
    """The kind of such a device and how many there are; None where no package adds one, or its driver finds none.

    Without such a package this costs a look at what is installed (milliseconds); with one, an import of torch. HEADWAY_DEVICE has
    torch asked in any case: on some machines with NVIDIA's devices only CUDA itself shows them.

    Args:
        environment: the variables that a process would start with.
        folders: where packages are installed; None: where this interpreter looks for them.
    """
    is_loaded = environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "0"
    if not (is_loaded and is_installed(folders)) and environment.get("HEADWAY_DEVICE", "cpu") == "cpu":
        return None
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _QUESTION], env=dict(environment), capture_output=True, text=True, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"^headway: (\S+) (\d+)$", asked.stdout, re.MULTILINE)
    return None if found is None else (found[1], int(found[2]))


def is_installed(folders: Iterable[str] | None = None) -> bool:
    """Is there a package that adds a kind of device to torch?"""
    # importlib.metadata would do, and its import alone takes longer than the rest of a launch.
    return any(
        _GROUP in _text(Path(package, "entry_points.txt"))
        for folder in dict.fromkeys(sys.path if folders is None else folders)
        for package in _packages(folder)
    )


def _packages(folder: str) -> list[str]:
    try:
        with os.scandir(folder or ".") as entries:
            return [entry.path for entry in entries if entry.name.endswith((".dist-info", ".egg-info"))]
    except OSError:
        return []


# How each kind of accelerator is told which devices a process may see; the first variable that is set counts.
VISIBLE = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
    "mps": (),
}

_BELOW = {"rocm": "ROCR_VISIBLE_DEVICES"}
"""A variable that a layer below reads first: those of VISIBLE then count the devices that it leaves, from 0."""

_NOTHING = ("", "-1", "NoDevFiles")
"""What people, and SLURM, write where a process is meant to see no device."""


@dataclass(frozen=True)
class Machine:
    """The facts a plan is made from.

    Attributes:
        hostname: its name.
        python: the interpreter to start processes with.
        num_cores: CPU cores that this process may use: affinity and cgroup quota counted in.
        accelerator: "cuda", "rocm", "xpu", "mps", or what torch calls a device that a vendor's package adds to it; None where
            there is none, or torch was built without any.
        device_ids: the visible accelerators, as VISIBLE's variable names them; by index where it has none.
        loopback: the name of the loopback interface; None where there is none.
        hidden_by: variables that name devices, but none that exists, "HIP_VISIBLE_DEVICES='2'"; empty where they are right.
    """

    hostname: str
    python: str
    num_cores: int
    accelerator: str | None = None
    device_ids: tuple[str, ...] = ()
    loopback: str | None = None
    hidden_by: str = ""

    @property
    def torch_device(self) -> str:
        """What torch calls the kind of device that a process computes on."""
        return {"rocm": "cuda", None: "cpu"}.get(self.accelerator, self.accelerator or "cpu")


def look(environment: Mapping[str, str], root: Path = Path("/")) -> Machine:
    """Find out what this machine has.

    Args:
        environment: the variables that restrict which devices are visible.
        root: where /proc, /sys and /dev hang.
    """
    kind, num_devices = _accelerators(root)
    if kind is not None and _torch_flavour().startswith("cpu"):
        kind, num_devices = None, 0
    ids = visible_ids(kind, num_devices, environment) if kind else ()
    if kind is None and root == Path("/"):
        kind, num_devices = accelerator(environment) or (None, 0)
        ids = tuple(map(str, range(num_devices)))  # by the vendor's own variable torch has counted already
    return Machine(
        hostname=os.uname().nodename if hasattr(os, "uname") else "this machine",
        python=sys.executable,
        num_cores=num_cores(root),
        accelerator=kind if ids else None,
        device_ids=ids,
        loopback=_loopback(root),
        hidden_by=_hidden_by(kind, environment) if kind and not ids else "",
    )


def _hidden_by(kind: str, environment: Mapping[str, str]) -> str:
    names = [*([_BELOW[kind]] if kind in _BELOW else []), *VISIBLE[kind]]
    said = {name: environment[name] for name in names if name in environment}
    if any(text.strip() in _NOTHING for text in said.values()):
        return ""
    return ", ".join(f"{name}={text!r}" for name, text in said.items())


def visible_ids(kind: str, num_devices: int, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The devices that a process may see, as their vendor's variable names them.

    As the drivers do, an index that does not exist ends the list.
    """
    below = environment.get(_BELOW.get(kind, ""))
    if below is not None:
        num_devices = len(_listed(below, num_devices))
    said = [environment[variable] for variable in VISIBLE[kind] if variable in environment]
    return _listed(said[0], num_devices) if said else tuple(str(index) for index in range(num_devices))


def _listed(text: str, num_devices: int) -> tuple[str, ...]:
    ids: list[str] = []
    for part in text.split(","):
        name = part.strip()
        is_index = re.fullmatch(r"-?\d+", name) is not None
        if not name or (is_index and not 0 <= int(name) < num_devices):
            break
        ids.append(name)
    return tuple(ids)


def num_cores(root: Path = Path("/")) -> int:
    """CPU cores that this process may use: its affinity, and no more than its cgroup's quota."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return cores


def _accelerators(root: Path) -> tuple[str | None, int]:
    if (root / "dev/nvidiactl").exists() or (root / "dev/dxg").exists():
        num_devices = _nvidia(root)
        if num_devices:
            return "cuda", num_devices
    if (root / "dev/nvhost-gpu").exists() or (root / "dev/nvgpu").exists():
        return "cuda", 1  # Jetson: one GPU on the chip, which NVML does not know
    if (root / "dev/kfd").exists():
        nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
        num_devices = sum(re.search(r"^simd_count [1-9]", _text(node), re.MULTILINE) is not None for node in nodes)
        if num_devices:
            return "rocm", num_devices
    intel = [
        path for path in (root / "sys/class/drm").glob("renderD*/device/vendor") if _text(path).strip() == "0x8086"
    ]
    # An Intel chip has a display part on most machines; only torch's own build says that it is meant to compute.
    if intel and _torch_flavour().startswith("xpu"):
        return "xpu", len(intel)
    if sys.platform == "darwin" and os.uname().machine == "arm64":
        return "mps", 1
    return None, 0


def _nvidia(root: Path) -> int:
    """NVIDIA devices that CUDA enumerates: by NVML, else nvidia-smi, else the device files."""
    if root == Path("/"):
        if available("pynvml") and (counted := _nvml()) is not None:
            return counted
        with suppress(OSError, subprocess.SubprocessError):
            listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True).stdout
            is_cut = re.search(r"^\s+MIG ", listed, re.MULTILINE) is not None
            return 1 if is_cut else len(re.findall(r"^GPU \d+", listed, re.MULTILINE))
    return sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in (root / "dev").glob("nvidia*"))


def _nvml() -> int | None:
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        is_cut = any(_has_mig(pynvml, handle) for handle in handles)
        return 1 if is_cut else len(handles)  # CUDA shows a process one MIG instance, unless it is told which
    except pynvml.NVMLError:
        return None


def _has_mig(nvml: Any, handle: Any) -> bool:
    try:
        return int(nvml.nvmlDeviceGetMigMode(handle)[0]) == 1
    except nvml.NVMLError:
        return False


def _torch_flavour() -> str:
    """The build of torch that is installed, by its version's local part: "cpu", "cu130", "xpu", or nothing."""
    from importlib import metadata  # costs as much as the rest of a launch, and is needed on few machines

    try:
        return metadata.version("torch").partition("+")[2]
    except metadata.PackageNotFoundError:
        return ""


def _loopback(root: Path) -> str | None:
    if sys.platform == "darwin":
        return "lo0"
    return "lo" if (root / "sys/class/net/lo").exists() else None


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


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
