"""The heartbeat: a thread that writes every second where the main thread is, and what torch's engine waits for.

Torch-free: it looks at torch only where the program has imported it. Python shuts down without it: a thread that comes
back from C++ while the interpreter ends would abort the process.

What torch's engines wait for: their flight recorders, read by a thread of its own once their collectives stand still.

gloo and NCCL keep a recorder each. NCCL's holds collectives that were enqueued and may be hundreds behind the program; the
earliest that is not complete is the one that the device stands in. Reading it asks CUDA about events, which may block
where the driver is stuck: so the heartbeat only takes what this thread found last. Torch-free.
"""

import atexit
import faulthandler
import json
import os
import re
import signal
import sys
import threading
import time
from itertools import islice
from typing import IO, Any

from headway.common import env, scope
from headway.common.callsite import stack
from headway.runtime import pulse

_DUMPS = re.compile(r"_dump_(\w+)_trace_json")
_CPU = "fr"
"""How torch's function for the recorder of gloo calls it; an accelerator's engine is called by its own name (nccl, xccl)."""

Call = dict[str, Any]
"""A collective of one group: "group", "number", "operation", "since" (None: not inside), "members" (None: unknown)."""


class Recorder:
    """The recorders of this process, of whatever engines its torch has."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._over = threading.Event()
        self._status = ""
        self._stands_since = 0.0
        self._calls: list[Call] | None = None
        self._dumps: dict[str, Any] = {}
        self._thread: threading.Thread | None = None

    def calls(self) -> list[Call] | None:
        """What was found last, and a look at it is asked for: the collective that each group is at; None: on the move.

        It returns at once, however long a look takes.
        """
        if not _is_joined():
            return []
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="headway-recorder", daemon=True)
            self._thread.start()
        self._asked.set()
        return self._calls

    def stop(self) -> None:
        """End the thread."""
        self._over.set()
        self._asked.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5)

    def _run(self) -> None:
        while not self._over.is_set():
            self._asked.wait()
            self._asked.clear()
            if not self._over.is_set() and _is_joined():
                self.look()

    def look(self) -> None:
        """Look once; where nothing has moved since the last look, read all that was recorded, which takes milliseconds."""
        if not self._dumps:
            self._dumps = _dumps()
        status = {engine: json.loads(dump(False)).get("pg_status", {}) for engine, dump in self._dumps.items()}
        former, self._status = self._status, json.dumps(status)
        if self._status != former:
            self._stands_since, self._calls = time.monotonic(), None
        elif self._calls is None:
            # Counters alone, which no event has to be asked for: all that is known where the next line does not come back.
            self._calls = [call for engine in status for call in _counted(engine, status[engine], self._stands_since)]
            self._calls = self._read(status)

    def _read(self, status: dict[str, Any]) -> list[Call]:
        now, members = time.monotonic(), _members()
        return [
            call
            for engine, dump in self._dumps.items()
            for call in latest(engine, json.loads(dump()).get("entries", []), status[engine], members, now)
        ]


def latest(
    engine: str, entries: list[dict[str, Any]], status: dict[str, Any], members: dict[str, list[int]], now: float
) -> list[Call]:
    """Per group: the earliest collective that is not complete, and since when; where all are, the last one.

    Args:
        engine: whose recorder it is, as torch's function for it calls it: "fr" (gloo's) or "nccl".
        entries: what it recorded, oldest first.
        status: its counters, by the number of the group.
        members: the ranks of each group, by its name.
        now: the monotonic clock's time.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    # These count sends and collectives, by their own numbers.
    counts_both = {entry["pg_id"] for entry in entries if entry.get("is_p2p")}
    for entry in entries:
        is_told = engine == _CPU or entry["pg_id"] in counts_both or _is_enqueued(entry, status)
        if not entry.get("is_p2p") and is_told:
            of_group = groups.setdefault(entry["process_group"][0], [])
            if of_group and of_group[-1]["pg_id"] != entry["pg_id"]:
                of_group.clear()  # of a group of this name that has been ended
            of_group.append(entry)
    found = []
    for name, recorded in groups.items():
        is_idle = engine == _CPU and _is_idle(status.get(str(recorded[-1]["pg_id"]), {}))
        still_open = [entry for entry in recorded if not entry.get("retired") and entry.get("state") != "completed"]
        is_inside = bool(still_open) and not is_idle
        entry = still_open[0] if is_inside else recorded[-1]
        entered = now - (time.time() - entry["time_created_ns"] / 1e9)
        found.append(
            {
                "group": name if engine == _CPU else f"{engine}:{name}",
                "number": entry["collective_seq_id"],
                "operation": entry["profiling_name"].split(":")[-1],
                "since": round(entered, 3) if is_inside else None,
                "members": members.get(name),
            }
        )
    return found


def _is_enqueued(entry: dict[str, Any], status: dict[str, Any]) -> bool:
    # NCCL's recorder notes a collective before the device has it, and takes an event that was never recorded for a reached one.
    last = status.get(str(entry["pg_id"]), {}).get("last_enqueued_collective")
    return last is None or int(entry["collective_seq_id"]) <= int(last)


def _is_idle(counts: dict[str, str]) -> bool:
    # gloo's threads count out of order: of two collectives, the earlier one may be noted as the last that completed.
    return counts.get("last_enqueued_collective") == counts.get("last_completed_collective")


def _counted(engine: str, status: dict[str, Any], since: float) -> list[Call]:
    """What counters alone tell: in which groups something is open."""
    unknown = {"number": 0, "operation": "a collective", "since": round(since, 3), "members": None}
    return [{"group": f"{engine}#{number}", **unknown} for number, counts in status.items() if not _is_idle(counts)]


def _engine() -> Any:
    return sys.modules.get("torch._C._distributed_c10d")


def _c10d() -> Any:
    return sys.modules.get("torch.distributed.distributed_c10d")


def _is_joined() -> bool:
    is_initialized = getattr(_c10d(), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


def _dumps() -> dict[str, Any]:
    """torch's functions that write out a recorder, by its engine."""
    names = {name: found[1] for name in dir(_engine()) if (found := _DUMPS.fullmatch(name))}
    return {engine: getattr(_engine(), name) for name, engine in names.items()}


def _members() -> dict[str, list[int]]:
    """The ranks of each group by its name, as far as torch tells."""
    world = getattr(_c10d(), "_world", None)
    names, ranks = getattr(world, "pg_names", {}), getattr(world, "pg_group_ranks", {})
    # Asked for once: another thread may end the group meanwhile.
    return {name: sorted(found) for group, name in list(names.items()) if (found := ranks.get(group)) is not None}


def forget() -> None:
    """Drop what was recorded of groups that are aborted now: their events go, and nothing may ask for them."""
    for name in dir(_engine()):
        if name.startswith("_reset_fr_recording"):
            getattr(_engine(), name)()


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
        still, calls = round(self._still_since, 3), self._recorder.calls()
        self._pulse.set_note({"stack": stack, "still": still, "torch": calls, "live": self._is_live})
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
