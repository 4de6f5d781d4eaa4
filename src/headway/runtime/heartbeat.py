"""The heartbeat: a thread that writes every second where the main thread is, and what torch's engine waits for.

Torch-free: it looks at torch only where the program has imported it. Python shuts down without it: a thread that comes
back from C++ while the interpreter ends would abort the process.
"""

import atexit
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from itertools import islice
from typing import IO, Any

from headway import env, scope
from headway.callsite import stack
from headway.runtime import pulse

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
    """

    def __init__(self, own: pulse.Pulse) -> None:
        self._pulse = own
        self._beats = 0
        self._stack: list[list[Any]] = []
        self._still_since = time.monotonic()
        self._status = ""
        self._calls: list[dict[str, Any]] | None = None
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
        """End the thread, and say that the program is over."""
        self._over.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5)
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
                "torch": self._torch(now),
                "live": self._is_live,
            }
        )
        self._pulse.beat(self._beats)

    def _torch(self, now: float) -> list[dict[str, Any]] | None:
        """The latest collective of each group, by torch's flight recorder; None while collectives are on the move."""
        c10d, engine = (
            sys.modules.get("torch.distributed.distributed_c10d"),
            sys.modules.get("torch._C._distributed_c10d"),
        )
        is_initialized, dump = getattr(c10d, "is_initialized", None), getattr(engine, "_dump_fr_trace_json", None)
        if dump is None or is_initialized is None or not is_initialized():
            return []
        status = json.loads(dump(False)).get("pg_status", {})
        former, self._status = self._status, json.dumps(status)
        if self._status != former:
            self._calls = None
        elif self._calls is None:
            # The whole recording takes milliseconds, so it is read once each time they come to a stand.
            self._calls = _latest(json.loads(dump()).get("entries", []), status, _members(c10d), now)
        return self._calls


def _latest(
    entries: list[dict[str, Any]], status: dict[str, Any], members: dict[str, list[int]], now: float
) -> list[dict[str, Any]]:
    """Per group: the latest collective, and how long it has been open."""
    latest = {entry["process_group"][0]: entry for entry in entries if not entry.get("is_p2p")}
    found = []
    for group, entry in latest.items():
        counts = status.get(str(entry.get("pg_id")), {})
        # gloo's threads count out of order: of two collectives, the earlier one may be noted as the last that completed.
        is_open = not entry.get("retired") and (
            counts.get("last_enqueued_collective") != counts.get("last_completed_collective")
        )
        entered = now - (time.time() - entry["time_created_ns"] / 1e9)
        found.append(
            {
                "group": group,
                "number": entry["collective_seq_id"],
                "operation": entry["profiling_name"].split(":")[-1],
                "since": round(entered, 3) if is_open else None,
                "members": members.get(group),
            }
        )
    return found


def _members(c10d: Any) -> dict[str, list[int]]:
    """The ranks of each group by its name, as far as torch tells."""
    world = getattr(c10d, "_world", None)
    names, ranks = getattr(world, "pg_names", {}), getattr(world, "pg_group_ranks", {})
    return {name: sorted(ranks[group]) for group, name in list(names.items()) if group in ranks}


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
    return Heartbeat(pulse.own())


def start() -> None:
    """Start this process's heartbeat, once."""
    if not scope.has(_of_this_process):
        # torch's own 2,000 collectives take a third of a second to read; some versions of torch record none.
        env.set_default("TORCH_FR_BUFFER_SIZE", NUM_RECORDED)
        scope.own(_of_this_process).start()
