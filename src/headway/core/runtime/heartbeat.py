"""Heartbeat thread that writes this process's stack and pending collectives to its heartbeat file every second.

The launcher's agent reads this file. The heartbeat is stopped before Python shuts down, because a thread that returns
from C++ during finalization would abort the process. This module does not import torch.
"""

import atexit
import faulthandler
import os
import signal
import sys
import threading
import time
from itertools import islice
from typing import IO, Any

from headway.common import env, scope
from headway.common.callsite import walk_stack
from headway.core.runtime.flight_recorder import FlightRecorder
from headway.core.runtime.heartbeat_file import HeartbeatFile, get_own_file

INTERVAL = 1.0
"""Seconds between heartbeats."""

ENDED = "ended"
"""Phase in the heartbeat file after the program has ended."""

STACK_DUMP_SIGNAL: int | None = getattr(signal, "SIGRTMAX", 0) - 3 if hasattr(signal, "SIGRTMAX") else None
"""Signal that makes a worker process write the stacks of its threads, even while it runs C code.

None if the system has no spare signal.
"""

_MAX_FRAMES = 60
"""Maximum number of frames of the main thread in a heartbeat, counted from the innermost one."""

NUM_RECORDED = "128"
"""Number of collectives that torch's flight recorder keeps, unless the user has set another number."""


class Heartbeat:
    """Thread that writes the stack and the pending collectives of this process to its heartbeat file.

    Args:
        file: File to write to, which the launcher's agent reads.
        recorder: Reader of the flight recorders of torch's backends.
    """

    def __init__(self, file: HeartbeatFile, recorder: FlightRecorder) -> None:
        self._file = file
        self._num_beats = 0
        self._stack: list[list[Any]] = []  # of the main thread at the last beat, as from `_read_main_stack`
        self._stack_since = time.monotonic()  # time of the beat at which this stack was seen first
        self._recorder = recorder
        self._is_stopped = threading.Event()
        self._lock = threading.Lock()  # held during a beat, and during a fork
        self._can_dump_stacks = False  # whether the process writes its stacks at `STACK_DUMP_SIGNAL`
        self._dump_file: IO[str] | None = None
        self._thread = threading.Thread(target=self._run, name="headway-heartbeat", daemon=True)

    def start(self) -> None:
        """Start the heartbeat. It runs until the program ends."""
        self._register_stack_dump()
        stop_before_shutdown(self.stop)
        if hasattr(os, "register_at_fork"):
            # A fork during a heartbeat would copy the locks that the heartbeat holds.
            os.register_at_fork(
                before=self._lock.acquire, after_in_parent=self._lock.release, after_in_child=self._after_fork
            )
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and mark the program as ended in the heartbeat file.

        A second call has no effect. Nor has a call in a forked child process, because only the parent is the rank.
        """
        if self._is_stopped.is_set():
            return
        self._is_stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5)
        self._recorder.stop()
        self._file.set_phase(ENDED)

    def _register_stack_dump(self) -> None:
        """Register a signal handler that writes the stacks of all threads when the launcher's agent sends the signal.

        The handler does not need the Python interpreter, so it works even while a thread runs C code.
        """
        if (
            STACK_DUMP_SIGNAL is None
            or self._file.path is None
            or threading.current_thread() is not threading.main_thread()
        ):
            return
        self._dump_file = open(f"{self._file.path}.stacks", "w")  # noqa: SIM115  (held open for the process's life)
        faulthandler.register(STACK_DUMP_SIGNAL, self._dump_file, all_threads=True)
        self._can_dump_stacks = True

    def _after_fork(self) -> None:
        """Stop the heartbeat of a forked child process, which is not a rank, and release the lock that the fork has copied."""
        self._is_stopped.set()
        self._lock.release()

    def _run(self) -> None:
        """Write a heartbeat at once and then every `INTERVAL` seconds, as the thread of this object, until it is stopped."""
        while not self._is_stopped.wait(INTERVAL if self._num_beats else 0.0):
            with self._lock:
                self.write_beat()

    def write_beat(self) -> None:
        """Write one heartbeat: the stack of the main thread and the collectives of torch's backends."""
        self._num_beats += 1
        now = time.monotonic()
        stack = _read_main_stack()
        if stack != self._stack:
            self._stack = stack
            self._stack_since = now
        note = {
            "stack": stack,
            "still": round(self._stack_since, 3),
            "torch": self._recorder.get_calls(),
            "live": self._can_dump_stacks,
        }
        self._file.set_note(note)
        self._file.record_beat(self._num_beats)


def _read_main_stack() -> list[list[Any]]:
    """Return [file, line, function] of the main thread's frames, innermost first."""
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = walk_stack(innermost) if innermost is not None else ()
    return [[frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name] for frame in islice(frames, _MAX_FRAMES)]


def stop_before_shutdown(stop: Any) -> None:
    """Register a function to be called when the main thread has ended, before the interpreter is finalized."""
    # Python calls these functions before it joins the other threads. `atexit` functions run only after that.
    register = getattr(threading, "_register_atexit", None)
    (register or atexit.register)(stop)


def _create_heartbeat() -> Heartbeat:
    return Heartbeat(get_own_file(), FlightRecorder())


def start_heartbeat() -> None:
    """Start the heartbeat of this process, unless it has been started.

    Also limit torch's flight recorder to `NUM_RECORDED` entries, unless an environment variable sets another number.
    """
    if not scope.has(_create_heartbeat):
        # torch's default of 2,000 entries takes a third of a second to read; some versions of torch record none.
        if env.get("TORCH_NCCL_TRACE_BUFFER_SIZE") is None:  # the older name of the variable
            env.set_default("TORCH_FR_BUFFER_SIZE", NUM_RECORDED)
        scope.get_or_create(_create_heartbeat).start()
