"""What scripts query about the machine: its GPUs, their driver, a free port."""

import socket
import subprocess

from headway.errors import ConfigError
from headway.runtime.device import detect


def _ask(field: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"nvidia-smi does not answer on this machine ({error}); is there an NVIDIA driver?"
        ) from error


def get_gpu_info() -> tuple[list[str], int]:
    """The names of the NVIDIA GPUs, and how many there are; does not initialise CUDA.

    Raises:
        ConfigError: there is no nvidia-smi.
    """
    names = [name.strip() for name in _ask("name")]
    return names, len(names)


def get_driver_version() -> str:
    """The NVIDIA driver's version.

    Raises:
        ConfigError: there is no nvidia-smi.
    """
    return _ask("driver_version")[0].strip()


def check_cuda_p2p_ib_support() -> bool:
    """Can the GPUs reach one another directly? False for several GeForce RTX 40 with a driver that cannot, True elsewhere."""
    try:
        names, count = get_gpu_info()
        driver = get_driver_version()
    except ConfigError:
        return True
    if count < 2 or not any("RTX 40" in name for name in names):
        return True
    return tuple(int(part) for part in driver.split(".")[:2]) >= (550, 40)


def check_cuda_fp8_capability() -> bool:
    """Does the first NVIDIA GPU support float8 (compute capability 8.9 or later)?"""
    try:
        major, minor = _ask("compute_cap")[0].split(".")
    except ConfigError:
        return False
    return (int(major), int(minor)) >= (8, 9)


def get_current_device_type() -> tuple[str, str]:
    """The kind of accelerator, and Accelerate's word for several of them: ("cuda", "MULTI_GPU"); "cuda" where there is none."""
    kind = detect().kind
    return ("cuda", "MULTI_GPU") if kind in ("cpu", "cuda") else (kind, f"MULTI_{kind.upper()}")


def get_free_port() -> int:
    """A free port on this machine."""
    with socket.socket() as found:
        found.bind(("", 0))
        port: int = found.getsockname()[1]
    return port
