"""Accelerators that a hardware vendor's package adds to torch, found in the metadata of the installed packages.

Such a package registers itself with an entry point in the group "torch.backends", which `import torch` loads. The
number of accelerators is queried from torch in a subprocess, because the launcher does not import torch.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

_ENTRY_POINT_GROUP = "[torch.backends]"

_QUERY_SCRIPT = """
import torch
found = torch.accelerator.current_accelerator(check_available=True)
if found is not None:
    print("headway:", found.type, torch.accelerator.device_count())
"""


def find_vendor_accelerator(
    environment: Mapping[str, str], folders: Iterable[str] | None = None
) -> tuple[str, int] | None:
    """Return the device type and number of accelerators that a hardware vendor's package adds to torch.

    If no such package is installed, this function only scans the installed packages (milliseconds). Otherwise it
    imports torch in a subprocess. It also does so if HEADWAY_DEVICE names a device type other than "cpu", because on
    some machines only CUDA itself reports NVIDIA devices. With TORCH_DEVICE_BACKEND_AUTOLOAD=0, torch loads no such
    package, so installed packages are ignored.

    Args:
        environment: Environment variables with which a process would start.
        folders: Folders of installed packages. Default: this interpreter's search path.

    Returns:
        Pair of (torch's name of the device type, number of devices). None if torch was not queried, finds no device,
            or does not answer within 120 seconds.
    """
    is_loaded = environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "0"
    if not (is_loaded and has_vendor_package(folders)) and environment.get("HEADWAY_DEVICE", "cpu") == "cpu":
        return None
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _QUERY_SCRIPT], env=dict(environment), capture_output=True, text=True, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"^headway: (\S+) (\d+)$", asked.stdout, re.MULTILINE)
    return None if found is None else (found[1], int(found[2]))


def has_vendor_package(folders: Iterable[str] | None = None) -> bool:
    """Whether any installed package registers a device backend for torch (the entry points `torch.backends`).

    Args:
        folders: Folders of installed packages. Default: this interpreter's search path.
    """
    # importlib.metadata could do this, but its import alone takes longer than the rest of a launch.
    for folder in dict.fromkeys(sys.path if folders is None else folders):
        for package in _list_packages(folder):
            try:
                entry_points = Path(package, "entry_points.txt").read_text("utf-8", "replace")
            except OSError:  # most packages have no entry points
                continue
            if _ENTRY_POINT_GROUP in entry_points:
                return True
    return False


def _list_packages(folder: str) -> list[str]:
    """Return the paths of the metadata folders of the packages in a folder. Empty if the folder cannot be read."""
    try:
        with os.scandir(folder or ".") as entries:
            return [entry.path for entry in entries if entry.name.endswith((".dist-info", ".egg-info"))]
    except OSError:
        return []
