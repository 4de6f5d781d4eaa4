"""Counts the calls of the CUDA runtime in which the host waits for the device."""

from collections.abc import Mapping

WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaMalloc",
    "cudaFree",
)


def count_waits(counts: Mapping[str, int]) -> int:
    """Return how often the host waited.

    Args:
        counts: Number of calls by name, such as those of the simulated runtime.
    """
    return sum(counts.get(name, 0) for name in WAITS)
