"""Start of the hang watch, which finds ranks that no longer advance.

It is started only in processes that no launcher's agent watches.
"""

from headway.core import extensions
from headway.core.runtime import heartbeat_file, process


def start_hang_watch() -> None:
    """Start the hang watch: a thread that finds ranks that no longer advance. It runs until the process runtime ends.

    Do nothing if a launcher's agent watches this process, if there is only one rank, or if the run has no timeout
    (`--timeout 0`).
    """
    runtime = process.current()
    if runtime.world_size > 1 and not heartbeat_file.is_watched() and runtime.timeout < process.NO_TIMEOUT:
        extensions.load("feature", "hang_watch")(runtime)
