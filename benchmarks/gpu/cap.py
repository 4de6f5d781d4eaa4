"""Less memory than there is, so that it runs out soon: of the device's allocator, or of the address space on a CPU."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.gpu.bench import Bench


@contextmanager
def capped(bench: Bench, num_bytes: int) -> Iterator[None]:
    """In this block the process gets `num_bytes` more than it holds; then as much as there is, again.

    Raises:
        NotImplementedError: torch cannot limit this kind of device.
    """
    bench.release()
    if bench.is_cpu:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + num_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        return
    limit = getattr(bench.module, "set_per_process_memory_fraction", None)
    if limit is None:
        raise NotImplementedError(f"torch cannot limit the memory of {bench.device.type}")
    held = bench.module.memory_reserved(bench.device)
    limit((held + num_bytes) / bench.module.mem_get_info(bench.device)[1], bench.device)
    try:
        yield
    finally:
        limit(1.0, bench.device)


def _address_space() -> int:
    """What this process has mapped, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
