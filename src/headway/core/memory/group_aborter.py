"""`GroupAborter`, a thread that aborts this rank's process group when another rank has run out of memory.

A rank that runs out of memory announces it on the control plane and leaves the process group. On gloo this wakes its
peers. On NCCL a kernel keeps waiting for the missing rank, while the main thread is blocked in C code, and a timeout would
end the process. So the thread on each rank listens for the announcement, and all ranks abort their groups together.
"""

import threading
import time

from headway.core.runtime import process
from headway.core.runtime.control_plane import control
from headway.errors import HeadwayError
from headway.log import get_logger

log = get_logger(__name__)

_POLL_INTERVAL = 0.1
"""Seconds between two checks of the control plane for an announced failure."""

_MAX_WAIT_FOR_PEERS = 5.0
"""Maximum time in seconds that ranks wait for each other to see the announcement of a failed attempt."""

_MAX_ABORT_TIME = 60.0
"""Maximum time in seconds for aborting a process group."""


class GroupAborter:
    """Background thread that aborts this rank's process group when another rank announces that its attempt has failed.

    The thread runs on every rank for the duration of one attempt.

    Args:
        key: Key on the control plane that the failing rank sets.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._should_stop = threading.Event()
        self._was_failure_seen = threading.Event()  # whether another rank has announced a failure
        self._has_thread_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-group-aborter", daemon=True)

    def start(self) -> None:
        """Start listening for failed attempts of other ranks."""
        self._thread.start()

    def stop(self) -> None:
        """Stop listening for failed attempts of other ranks, and wait until the listening thread has ended."""
        self._should_stop.set()
        self._thread.join()

    def wait(self) -> None:
        """Wait, for a limited time, until the process group has been aborted.

        Returns at once if no failure was announced and this process can leave the group without waiting for peers.
        """
        # During the abort the group can no longer be queried, and a new group would be destroyed with it.
        if self._was_failure_seen.is_set() or process.does_exit_block_peers():
            self._has_thread_ended.wait(_MAX_WAIT_FOR_PEERS + _MAX_ABORT_TIME)

    def _run(self) -> None:
        """Wait for the announcement of a failure until `stop` is called, and abort the process group then."""
        try:
            while not self._should_stop.wait(_POLL_INTERVAL):
                # The script's Accelerator starts the runtime, with its own settings. Until then there is no group.
                is_joined = process.has_control_link() and process.does_exit_block_peers()
                if is_joined and control.current().has_key(self._key):
                    self._was_failure_seen.set()
                    self._wait_for_peers(control.current())
                    process.abort_group()
                    return
        except (HeadwayError, RuntimeError) as error:  # the host of the control plane is gone, so the run ends
            log.debug("no longer listening for failed attempts: %s", error)
        finally:
            self._has_thread_ended.set()

    def _wait_for_peers(self, plane: control.Control) -> None:
        """Wait, for at most `_MAX_WAIT_FOR_PEERS`, until all ranks have seen the announcement, so that they abort together."""
        ready, deadline = f"{self._key}/ready", time.monotonic() + _MAX_WAIT_FOR_PEERS
        num_ready = plane.count(ready)
        while num_ready < plane.world_size and time.monotonic() < deadline:
            time.sleep(0.01)
            num_ready = plane.count(ready, 0)
