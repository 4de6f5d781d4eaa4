"""Run saves on a background thread, one at a time."""

import threading
from collections.abc import Callable

from headway.core.checkpoint.saving import writer
from headway.core.checkpoint.saving.job import SaveJob
from headway.core.checkpoint.saving.waits import Wait, WaitRecorder
from headway.errors import CheckpointError


class BackgroundSave:
    """Background thread that runs at most one save at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None  # None if `join` was called after the last save
        self._end = threading.Event()  # set when the save has ended
        self._error: CheckpointError | None = None  # of a failed save, until `raise_error` raises it
        self._wait_recorder = WaitRecorder()
        self._state_lock = threading.Lock()  # protects the next two attributes
        self._is_writing = False
        self._end_callbacks: list[Callable[[], None]] = []  # called at the end of the running save

    @property
    def is_busy(self) -> bool:
        """Whether a save is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: SaveJob) -> None:
        """Start a save on the background thread. `join` must have been called after the previous save."""

        def run() -> None:
            try:
                writer.write_checkpoint(job, self._wait_recorder)
            except BaseException as error:  # kept for raise_error(), which raises it in the training loop
                self._error = CheckpointError(
                    f"{job.final} could not be written in the background ({type(error).__name__}: {error}). Earlier checkpoints "
                    "are intact"
                )
                self._error.__cause__ = error
                writer.remove_staging(job)
            finally:
                with self._state_lock:
                    self._is_writing = False
                    callbacks, self._end_callbacks = self._end_callbacks, []
                try:
                    for callback in callbacks:
                        callback()
                finally:
                    self._end.set()

        self._end.clear()
        self._is_writing = True
        self._thread = threading.Thread(target=run, name="headway-save", daemon=False)
        self._thread.start()

    def call_when_idle(self, callback: Callable[[], None]) -> None:
        """Call a function now if no save is running, else at the end of the running save on its thread.

        Args:
            callback: Function to call. It should not raise an error.
        """
        with self._state_lock:
            if self._is_writing:
                self._end_callbacks.append(callback)
                return
        callback()

    def join(self) -> None:
        """Wait for the running save, if there is one. If the save fails, keep its error for `raise_error`."""
        if self._thread is not None:
            with self._wait_recorder.record_wait(Wait.FOR_WRITER):
                # After Ctrl-C in Thread.join() Python regards the thread as ended, and does not wait for it at exit.
                self._end.wait()
                self._thread.join()
            self._thread = None

    def raise_error(self) -> None:
        """Raise the error of a failed save. It is raised only once. Do nothing if no save has failed.

        Raises:
            CheckpointError: If the checkpoint could not be written.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error
