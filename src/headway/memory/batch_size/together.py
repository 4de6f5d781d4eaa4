"""A process group that all ranks abort at once, so that what waits in it on the device comes back.

Where a rank leaves a gloo group, its peers hear of it. A kernel of NCCL's waits on for a rank that ran out of memory, and its
timeout ends the process, not the wait. So who fails announces it on the control plane; a thread of every rank hears of it while
the main thread stands in C code, and when all have, each aborts its own group.
"""

import threading
import time

from headway.errors import HeadwayError
from headway.log import get_logger
from headway.runtime import process
from headway.runtime.control_plane import control

log = get_logger(__name__)

_LOOK = 0.1
"""Seconds between two looks for an announcement."""

_MEETING = 5.0
"""Seconds in which all ranks hear of it; who has not by then is not waited for."""

_ABORT = 60.0
"""Seconds that aborting may take."""


class GroupAborter:
    """One attempt's; on every rank, from its begin to its end.

    Args:
        key: what the rank that fails sets on the control plane.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._over = threading.Event()
        self._is_heard = threading.Event()
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-alarm", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def stop(self) -> None:
        """The attempt is over."""
        self._over.set()
        self._thread.join()

    def wait(self) -> None:
        """The failure has been announced: wait until this rank's group is aborted, where that is needed."""
        # Halfway through the abort there is no group any more to ask, and a new one would be torn down with it.
        if self._is_heard.is_set() or process.waits_for_peers():
            self._is_done.wait(_MEETING + _ABORT)

    def _run(self) -> None:
        try:
            while not self._over.wait(_LOOK):
                if self._is_announced():
                    self._is_heard.set()
                    self._meet(control.current())
                    process.abort_group()
                    return
        except (HeadwayError, RuntimeError) as error:  # the plane's host is gone, and the run ends
            log.debug("no longer listening for failed attempts: %s", error)
        finally:
            self._is_done.set()

    def _is_announced(self) -> bool:
        # A script's Accelerator starts the runtime, by its own settings; until then there is no group either.
        return process.has_control_link() and process.waits_for_peers() and control.current().has(self._key)

    def _meet(self, plane: control.Control) -> None:
        ready, deadline = f"{self._key}/ready", time.monotonic() + _MEETING
        num_ready = plane.count(ready)
        while num_ready < plane.world_size and time.monotonic() < deadline:
            time.sleep(0.01)
            num_ready = plane.count(ready, 0)
