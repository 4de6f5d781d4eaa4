"""Context manager that pauses Python's cyclic garbage collector, for code in which it costs time and frees nothing."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Return a context manager (or decorator) in which cyclic garbage collection is disabled.

    It is for code that creates millions of small objects and almost no reference cycles, such as a forecast or the
    manifest of 10,000 parameters. Garbage collection would take a third of the run time of such code. If another thread
    enables the collector meanwhile, only time is lost.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
