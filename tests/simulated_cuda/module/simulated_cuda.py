"""The simulated runtime seen from Python: what was asked of it, what could not be computed. torch loads it by itself."""

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

        torch.backends.cuda.enable_cudnn_sdp(False)  # its library has no engines; with values its results are computed


def _lines(ask: object) -> list[str]:
    size = ask(None, 0)  # type: ignore[operator]
    buffer = ctypes.create_string_buffer(size + 4096)
    ask(buffer, len(buffer))  # type: ignore[operator]
    return buffer.value.decode().splitlines()


def counts() -> dict[str, int]:
    """How often the runtime was asked for each thing by this process."""
    return {
        name: int(number) for number, name in (line.split(" ", 1) for line in _lines(_RUNTIME.simulated_cuda_counts))
    }


def not_computed() -> list[str]:
    """Operations whose values are not those of a card, with their number and the reason."""
    return (
        _lines(ctypes.CDLL(str(_LIBRARIES / "libsimulated_values.so")).simulated_values_missing) if _HAS_VALUES else []
    )


def pinned_bytes(peak: bool = False) -> int:
    """Host memory that is pinned, now or at most."""
    return int(_RUNTIME.simulated_cuda_pinned_bytes(peak))


def clock() -> float:
    """What time it is for the host by the virtual clock, ms; 0 without SIMULATED_CUDA_CLOCK."""
    return float(_RUNTIME.simulated_cuda_host_ns()) / 1e6
