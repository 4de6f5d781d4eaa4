"""What this machine has, found without torch: visible accelerators, CPU cores, the loopback interface."""

import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.common.optional import available
from headway.launch.machine import plugged

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
        kind, num_devices = plugged.accelerator(environment) or (None, 0)
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
        if available("pynvml"):
            counted = _nvml()
            if counted is not None:
                return counted
        import subprocess

        try:
            listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True).stdout
            return len(re.findall(r"^GPU \d+", listed, re.MULTILINE))
        except (OSError, subprocess.SubprocessError):
            return _nvidia_files(root)
    return _nvidia_files(root)


def _nvidia_files(root: Path) -> int:
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
        return path.read_text()
    except OSError:
        return ""
