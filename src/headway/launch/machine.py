"""Detection of this machine's hardware without importing torch: accelerators, CPU cores and the loopback interface."""

import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.common.optional import is_available
from headway.common.system_files import read_system_file
from headway.core.runtime.peer_access import describe_broken_transfers
from headway.launch.vendor_devices import find_vendor_accelerator
from headway.launch.visible_devices import describe_hiding_variables, list_visible_ids


@dataclass(frozen=True)
class Machine:
    """Hardware of one machine, from which a launch is planned.

    Attributes:
        hostname: Host name.
        python: Path of the interpreter that starts processes.
        num_cores: Number of CPU cores that this process may use, limited by its affinity and its control group's quota.
        accelerator: "cuda", "rocm", "xpu", "mps", or torch's name of a device that a vendor's package adds. None if
            there is no accelerator, or torch was built without support for it.
        device_ids: IDs of the visible accelerators, as listed in an environment variable such as CUDA_VISIBLE_DEVICES.
            If no such variable is set, their indices.
        loopback: Name of the loopback interface. None if there is none.
        broken_transfers: Card and driver with which direct transfers between GPUs fail, such as "GeForce RTX 4090 with driver
            535.54.03". Empty if there are none.
        hidden_by: Text with the environment variables that hide all accelerators because they name only devices that do
            not exist, such as "HIP_VISIBLE_DEVICES='2'". Otherwise empty.
    """

    hostname: str
    python: str
    num_cores: int
    accelerator: str | None = None
    device_ids: tuple[str, ...] = ()
    loopback: str | None = None
    hidden_by: str = ""
    broken_transfers: str = ""

    @property
    def torch_device(self) -> str:
        """torch device type that processes on this machine use, such as "cuda"."""
        return {"rocm": "cuda", None: "cpu"}.get(self.accelerator, self.accelerator or "cpu")


def inspect_machine(environment: Mapping[str, str], root: Path = Path("/")) -> Machine:
    """Return the hardware of this machine.

    Args:
        environment: Environment variables, which may restrict the visible devices.
        root: Folder that contains the folders `proc`, `sys` and `dev`. Default: "/".
    """
    kind, num_devices = _find_accelerators(root)
    if kind is not None and _read_torch_build().startswith("cpu"):
        kind, num_devices = None, 0
    ids = list_visible_ids(kind, num_devices, environment) if kind else ()
    if kind is None and root == Path("/"):
        kind, num_devices = find_vendor_accelerator(environment) or (None, 0)
        ids = tuple(map(str, range(num_devices)))  # torch's count already respects the vendor's own variable
    return Machine(
        hostname=os.uname().nodename if hasattr(os, "uname") else "this machine",
        python=sys.executable,
        num_cores=count_cores(root),
        accelerator=kind if ids else None,
        device_ids=ids,
        loopback=_find_loopback(root),
        hidden_by=describe_hiding_variables(kind, environment) if kind and not ids else "",
        broken_transfers=describe_broken_transfers(root) if kind == "cuda" and ids else "",
    )


def count_cores(root: Path = Path("/")) -> int:
    """Return the number of CPU cores that this process may use, limited by its affinity and its control group's quota.

    Args:
        root: Folder that contains the folder `sys`. Default: "/".
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return cores


def _find_accelerators(root: Path) -> tuple[str | None, int]:
    """Return the kind and the number of accelerators, as shown by their drivers' files. (None, 0) without any.

    Args:
        root: Root of the file system, for tests.
    """
    if (root / "dev/nvidiactl").exists() or (root / "dev/dxg").exists():
        num_devices = _count_nvidia(root)
        if num_devices:
            return "cuda", num_devices
    if (root / "dev/nvhost-gpu").exists() or (root / "dev/nvgpu").exists():
        return "cuda", 1  # Jetson: one GPU on the chip, which NVML does not report
    if (root / "dev/kfd").exists():
        nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
        num_devices = sum(
            re.search(r"^simd_count [1-9]", read_system_file(node), re.MULTILINE) is not None for node in nodes
        )
        if num_devices:
            return "rocm", num_devices
    intel = [
        path
        for path in (root / "sys/class/drm").glob("renderD*/device/vendor")
        if read_system_file(path).strip() == "0x8086"
    ]
    # Most Intel chips contain a GPU for the display. Only torch's XPU build shows that it is meant for computing.
    if intel and _read_torch_build().startswith("xpu"):
        return "xpu", len(intel)
    if sys.platform == "darwin" and os.uname().machine == "arm64":
        return "mps", 1
    return None, 0


def _count_nvidia(root: Path) -> int:
    """Return the number of NVIDIA devices that CUDA enumerates.

    The number is queried from NVML, else from nvidia-smi, else from the device files. If `root` is not "/", only its
    device files are counted. If a device is divided by MIG, the number is 1.
    """
    if root == Path("/"):
        if is_available("pynvml") and (counted := _count_by_nvml()) is not None:
            return counted
        with suppress(OSError, subprocess.SubprocessError):
            listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True).stdout
            is_cut = re.search(r"^\s+MIG ", listed, re.MULTILINE) is not None
            return 1 if is_cut else len(re.findall(r"^GPU \d+", listed, re.MULTILINE))
    return sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in (root / "dev").glob("nvidia*"))


def _count_by_nvml() -> int | None:
    """Return the number of GPUs that a process can use according to NVML, or None if NVML fails."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        is_cut = any(_has_mig(pynvml, handle) for handle in handles)
        return 1 if is_cut else len(handles)  # CUDA shows a process one MIG instance by default
    except pynvml.NVMLError:
        return None


def _has_mig(nvml: Any, handle: Any) -> bool:
    """Whether a GPU is divided into MIG instances."""
    try:
        return int(nvml.nvmlDeviceGetMigMode(handle)[0]) == 1
    except nvml.NVMLError:
        return False


def _read_torch_build() -> str:
    """Return the build of the installed torch, such as "cpu", "cu130" or "xpu". Empty if it is unknown.

    The build is the local part of torch's version number.
    """
    from importlib import metadata  # takes as long as the rest of a launch, and only few machines need it

    try:
        return metadata.version("torch").partition("+")[2]
    except metadata.PackageNotFoundError:
        return ""


def _find_loopback(root: Path) -> str | None:
    """Return the name of the loopback interface, or None if it is not known."""
    if sys.platform == "darwin":
        return "lo0"
    return "lo" if (root / "sys/class/net/lo").exists() else None
