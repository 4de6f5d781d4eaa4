"""Python interface of the simulated CUDA runtime: its call counts and uncomputed operations. torch loads this module by itself."""

import ctypes
import os
import sysconfig
from pathlib import Path

_LIBRARIES = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "lib"
os.environ.setdefault("TRITON_LIBCUDA_PATH", str(_LIBRARIES))
_RUNTIME = ctypes.CDLL(str(_LIBRARIES / "libcudart.so.13"))
_RUNTIME.simulated_cuda_pinned_bytes.restype = ctypes.c_size_t
_RUNTIME.simulated_cuda_has_clock.restype = ctypes.c_bool
_RUNTIME.simulated_cuda_host_ns.restype = ctypes.c_double
_HAS_VALUES = os.environ.get("SIMULATED_CUDA_VALUES", "1") != "0"


def _load() -> None:
    if _HAS_VALUES or _RUNTIME.simulated_cuda_has_clock():
        ctypes.CDLL(str(_LIBRARIES / "libsimulated_values.so")).simulated_values_install(_HAS_VALUES)
    if not _HAS_VALUES:
        import torch

        torch.backends.cuda.enable_cudnn_sdp(False)  # the simulated cuDNN has no engines


def _read_lines(ask: object) -> list[str]:
    size = ask(None, 0)  # type: ignore[operator]
    buffer = ctypes.create_string_buffer(size + 4096)
    ask(buffer, len(buffer))  # type: ignore[operator]
    return buffer.value.decode().splitlines()


def counts() -> dict[str, int]:
    """Return how often this process called each function of the runtime."""
    return {
        name: int(number)
        for number, name in (line.split(" ", 1) for line in _read_lines(_RUNTIME.simulated_cuda_counts))
    }


def not_computed() -> list[str]:
    """Return the operations whose values could not be computed, each with its count and the reason."""
    return (
        _read_lines(ctypes.CDLL(str(_LIBRARIES / "libsimulated_values.so")).simulated_values_missing)
        if _HAS_VALUES
        else []
    )


def pinned_bytes(peak: bool = False) -> int:
    """Return the number of bytes of pinned host memory, or their peak."""
    return int(_RUNTIME.simulated_cuda_pinned_bytes(peak))


def clock() -> float:
    """Return the host's virtual time in milliseconds, or 0 without SIMULATED_CUDA_CLOCK."""
    return float(_RUNTIME.simulated_cuda_host_ns()) / 1e6
