"""Start the hang watch, which detects ranks that make no progress, inside a process.

Processes that `headway launch` started do not need it, because their launcher's agent runs it.
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
