"""Accelerators that a vendor's package adds to torch, found by what is installed; torch is asked in a process of its own.

Such a package tells torch about itself by an entry point of the group "torch.backends", which `import torch` loads.
"""

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping

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
            [sys.executable, "-c", _QUESTION],
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    for line in asked.stdout.splitlines():
        words = line.split()
        if words[:1] == ["headway:"]:
            return words[1], int(words[2])
    return None


def is_installed(folders: Iterable[str] | None = None) -> bool:
    """Is there a package that adds a kind of device to torch?"""
    return any(
        _adds_one(entry)
        for folder in dict.fromkeys(sys.path if folders is None else folders)
        for entry in _packages(folder)
    )


def _packages(folder: str) -> list[str]:
    try:
        with os.scandir(folder or ".") as entries:
            return [entry.path for entry in entries if entry.name.endswith((".dist-info", ".egg-info"))]
    except OSError:
        return []


def _adds_one(package: str) -> bool:
    # importlib.metadata would do, and its import alone takes longer than the rest of a launch.
    try:
        with open(os.path.join(package, "entry_points.txt"), encoding="utf-8", errors="replace") as file:
            return _GROUP in file.read()
    except OSError:
        return False
