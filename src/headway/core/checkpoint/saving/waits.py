"""Record waits for the parts of other ranks, so that the hang watch does not report this rank as hanging."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from headway.core.runtime import heartbeat_file


class Wait(Enum):
    """Reason why a thread of a save waits.

    Attributes:
        FOR_WRITER: The thread waits until the writing thread has ended.
        FOR_PARTS: The writing thread has written this rank's part, and waits for the parts of other ranks.
    """

    FOR_WRITER = 1
    FOR_PARTS = 2


class WaitRecorder:
    """Recorder of waits for the parts of other ranks, so that the hang watch does not report this rank as hanging.

    The main thread waits for other ranks itself, or for the background thread that writes the checkpoint. Meanwhile,
    the hang watch sees neither a collective nor progress. So the wait is recorded in the heartbeat file that
    the hang watch reads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits: set[Wait] = set()
        self._former_phase: str | None = None
        """Phase in the heartbeat file before the wait was recorded there. None if no wait is recorded."""

    @contextmanager
    def record_wait(self, wait: Wait) -> Iterator[None]:
        """Return a context manager within which the calling thread is recorded as waiting.

        The heartbeat file shows the wait if the training loop is blocked by it. This is so while both reasons are recorded, or
        while the main thread itself waits for the parts of other ranks.

        Args:
            wait: Reason of the wait.
        """
        is_main = threading.current_thread() is threading.main_thread()
        waits = {wait, Wait.FOR_WRITER} if is_main else {wait}
        self._update_waits(waits, set())
        try:
            yield
        finally:
            self._update_waits(set(), waits)

    def _update_waits(self, begun: set[Wait], ended: set[Wait]) -> None:
        """Record waits that have begun or ended. Show in the heartbeat file whether the training loop is blocked by them.

        Args:
            begun: Waits that have begun.
            ended: Waits that have ended.
        """
        with self._lock:
            self._waits = (self._waits | begun) - ended
            is_blocked, own_file = self._waits == {*Wait}, heartbeat_file.get_own_file()
            if is_blocked and self._former_phase is None:
                self._former_phase = own_file.read().phase
                own_file.set_phase(heartbeat_file.WAITING_FOR_PARTS)
            elif not is_blocked and self._former_phase is not None:
                own_file.set_phase(self._former_phase)
                self._former_phase = None
