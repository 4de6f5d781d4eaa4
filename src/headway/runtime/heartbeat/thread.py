"""The heartbeat: a thread that writes every second where the main thread is, and what torch's engine waits for.

Torch-free: it looks at torch only where the program has imported it. Python shuts down without it: a thread that comes
back from C++ while the interpreter ends would abort the process.
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
from headway.common.callsite import stack
from headway.runtime.heartbeat import file as pulse
from headway.runtime.heartbeat.flight_recorder import Recorder

INTERVAL = 1.0
"""Seconds between beats."""

ENDED = "ended"
"""The phase of a process whose program is over."""

LIVE_SIGNAL: int | None = getattr(signal, "SIGRTMAX", 0) - 3 if hasattr(signal, "SIGRTMAX") else None
"""The signal that makes a worker write its live stack, even from C code; None where the system has none to spare."""

_MAX_FRAMES = 60

NUM_RECORDED = "128"
"""How many collectives torch's flight recorder keeps, unless the user says."""


class Heartbeat:
    """The thread of one process.

    Args:
        own: where it writes.
        recorder: tells what torch's engines wait for.
    """

    def __init__(self, own: pulse.HeartbeatFile, recorder: Recorder) -> None:
        self._pulse = own
        self._beats = 0
        self._stack: list[list[Any]] = []
        self._still_since = time.monotonic()
        self._recorder = recorder
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._is_live = False
        self._dump: IO[str] | None = None
        self._thread = threading.Thread(target=self._run, name="headway-heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to beat; until the program is over."""
        self._listen()
        before_shutdown(self.stop)
        if hasattr(os, "register_at_fork"):
            # A fork in the middle of a beat would copy the locks it holds.
            os.register_at_fork(
                before=self._lock.acquire, after_in_parent=self._lock.release, after_in_child=self._after_fork
            )
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and say that the program is over; a forked child's end is not the rank's."""
        if self._over.is_set():
            return
        self._over.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5)
        self._recorder.stop()
        self._pulse.set_phase(ENDED)

    def _listen(self) -> None:
        """Let the agent's signal write the stacks of all threads, without the interpreter's help."""
        if LIVE_SIGNAL is None or self._pulse.path is None or threading.current_thread() is not threading.main_thread():
            return
        self._dump = open(f"{self._pulse.path}.stacks", "w")  # noqa: SIM115  (held open for the process's life)
        faulthandler.register(LIVE_SIGNAL, self._dump, all_threads=True)
        self._is_live = True

    def _after_fork(self) -> None:
        self._over.set()
        self._lock.release()

    def _run(self) -> None:
        while not self._over.wait(INTERVAL if self._beats else 0.0):
            with self._lock:
                self.beat()

    def beat(self) -> None:
        """Look once."""
        self._beats += 1
        now = time.monotonic()
        stack = _main_stack()
        if stack != self._stack:
            self._stack, self._still_since = stack, now
        self._pulse.set_note(
            {
                "stack": stack,
                "still": round(self._still_since, 3),
                "torch": self._recorder.calls(),
                "live": self._is_live,
            }
        )
        self._pulse.beat(self._beats)


def _main_stack() -> list[list[Any]]:
    """[file, line, function] of the main thread's frames, innermost first."""
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = stack(innermost) if innermost is not None else ()
    return [[frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name] for frame in islice(frames, _MAX_FRAMES)]


def before_shutdown(stop: Any) -> None:
    """Call `stop` when the main thread is done, before anything of the interpreter is taken down."""
    register = getattr(threading, "_register_atexit", None)
    (register or atexit.register)(stop)


def _of_this_process() -> Heartbeat:
    return Heartbeat(pulse.own(), Recorder())


def start() -> None:
    """Start this process's heartbeat, once."""
    if not scope.has(_of_this_process):
        # torch's own 2,000 collectives take a third of a second to read; some versions of torch record none.
        if env.get("TORCH_NCCL_TRACE_BUFFER_SIZE") is None:  # its older name
            env.set_default("TORCH_FR_BUFFER_SIZE", NUM_RECORDED)
        scope.own(_of_this_process).start()
