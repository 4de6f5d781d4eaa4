"""The hang watch: which rank the others wait for, where it is, and why; with an agent that looks on, and without."""

from headway.runtime import process, pulse


def start() -> None:
    """Watch this process, unless an agent does, it is alone, or its timeout has no end; until its runtime ends."""
    runtime = process.current()
    if runtime.world_size > 1 and not pulse.is_watched() and runtime.timeout < process.FOR_EVER:
        from headway.launch.watch import hang_watch

        hang_watch.start(runtime)
