"""Longer timeouts for ranks that wait for a rank whose work takes long on purpose, such as a download.

The backend fixes a collective's timeout when the collective starts, so the timeouts must be extended before the ranks
wait. Afterward, process groups and the control plane keep the extension. The hang watch still finds real hangs after
the run's usual timeout, because it adds the extension only while a rank's heartbeat requests it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from headway.common import scope
from headway.core.runtime import group, heartbeat_file, process
from headway.core.runtime.control_plane import control


class _LargestExtension:
    """Largest extension of timeouts so far in this process, in seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0


def extend_timeouts(seconds: float) -> None:
    """Extend the timeouts of later collectives and votes on this rank. An earlier, larger extension remains.

    Call this on every rank, because any rank may have to wait. Do nothing in a run with a single process.

    Args:
        seconds: Seconds to add to the timeouts.
    """
    if process.current().world_size == 1:
        return
    largest = scope.get_or_create(_LargestExtension)
    largest.seconds = max(largest.seconds, seconds)
    group.extend_timeouts(largest.seconds)
    control.current().extend_limit(largest.seconds)


@contextmanager
def request_longer_timeout(seconds: float) -> Iterator[None]:
    """Return a context manager in whose `with` block the hang watch gives the other ranks more time to wait for this one.

    Args:
        seconds: Seconds that the hang watch adds to the timeout. 0 requests nothing.
    """
    if not seconds:
        yield
        return
    own_file = heartbeat_file.get_own_file()
    earlier = own_file.read().timeout_extension  # of an outer block
    own_file.set_timeout_extension(max(seconds, earlier))
    try:
        yield
    finally:
        own_file.set_timeout_extension(earlier)
