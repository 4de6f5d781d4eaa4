"""Memory limits, so that memory runs out soon: of the device's allocator, or of the address space on a CPU."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.gpu.bench import Bench


@contextmanager
def limit_memory(bench: Bench, num_bytes: int) -> Iterator[None]:
    """Limit this process to `num_bytes` more than it holds now, until the block ends.

    Raises:
        NotImplementedError: If torch cannot limit the memory of this kind of device.
    """
    bench.release()
    if bench.is_cpu:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (_get_address_space() + num_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        return
    set_fraction = getattr(bench.module, "set_per_process_memory_fraction", None)
    if set_fraction is None:
        raise NotImplementedError(f"torch cannot limit the memory of {bench.device.type}")
    reserved = bench.module.memory_reserved(bench.device)
    set_fraction((reserved + num_bytes) / bench.module.mem_get_info(bench.device)[1], bench.device)
    try:
        yield
    finally:
        set_fraction(1.0, bench.device)


def _get_address_space() -> int:
    """Return the bytes of address space that this process has mapped."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
