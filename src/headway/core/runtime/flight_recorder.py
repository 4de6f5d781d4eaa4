"""Reader of the flight recorders of torch's backends, which list pending collectives.

gloo and NCCL each keep a recorder. NCCL's recorder holds enqueued collectives, which can be hundreds of collectives
ahead of the device. The earliest incomplete one is the collective that the device is in. Reading NCCL's recorder
queries CUDA events, which can block if the driver is stuck. So a separate thread reads the recorders once their
collectives stop advancing. The heartbeat thread, which reports the state of this process, only takes the latest result.

This module does not import torch. It reads recorders only if the program has imported torch.
"""

import json
import re
import sys
import threading
import time
from typing import Any, TypedDict

_DUMPS = re.compile(r"_dump_(\w+)_trace_json")

_GLOO_NAME = "fr"
"""Part of the name of torch's function `_dump_fr_trace_json` that identifies gloo's recorder.

The function for an accelerator's recorder contains the name of the backend instead, such as nccl or xccl.
"""


class CurrentCollective(TypedDict):
    """Collective that one process group is in, or its last one. The heartbeat writes it as JSON.

    Attributes:
        group: Name of the process group. For backends other than gloo, it is preceded by the backend's name and a colon.
        number: Number of the collective in its group.
        operation: Kind of the collective, such as "all_reduce".
        since: Time on the monotonic clock, in seconds, at which this rank entered it; None if it is complete.
        members: Sorted global ranks of the group; None if unknown.
    """

    group: str
    number: int
    operation: str
    since: float | None
    members: list[int] | None


class FlightRecorder:
    """Background reader of the flight recorders of all backends in this process."""

    def __init__(self) -> None:
        self._is_requested = threading.Event()  # set by `get_calls`, and by `stop` to wake the thread
        self._is_stopped = threading.Event()
        self._status = ""  # counters of all groups as JSON, as read last
        self._stalled_since = 0.0  # time on the monotonic clock at which the counters last changed
        self._calls: list[CurrentCollective] | None = None  # result of `get_calls`
        self._dump_functions: dict[str, Any] = {}  # torch's functions by backend; found at the first reading
        self._thread: threading.Thread | None = None

    def get_calls(self) -> list[CurrentCollective] | None:
        """Return the current collective of each group as read last, and request a new reading without waiting for it.

        Returns:
            The collectives; an empty list if there is no process group. None while collectives advance, which means
                that the process does not hang, and before the first reading.
        """
        if not _has_process_group():
            return []
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="headway-recorder", daemon=True)
            self._thread.start()
        self._is_requested.set()
        return self._calls

    def stop(self) -> None:
        """Stop the background thread that reads the recorders."""
        self._is_stopped.set()
        self._is_requested.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5)

    def _run(self) -> None:
        """Read the counters at each request, as the thread of this object, until it is stopped."""
        while not self._is_stopped.is_set():
            self._is_requested.wait()
            self._is_requested.clear()
            if not self._is_stopped.is_set() and _has_process_group():
                self.check_counters()

    def check_counters(self) -> None:
        """Check the recorders' counters once.

        If they have not changed since the last check, read all entries, which takes milliseconds.
        """
        if not self._dump_functions:
            self._dump_functions = _find_dump_functions()
        # With the argument False, torch dumps the counters without the entries.
        status = {
            backend: json.loads(dump(False)).get("pg_status", {}) for backend, dump in self._dump_functions.items()
        }
        previous_status, self._status = self._status, json.dumps(status)
        if self._status != previous_status:
            self._stalled_since = time.monotonic()
            self._calls = None
        elif self._calls is None:
            # First publish what the counters show, which query no CUDA event. If the next line blocks, this stays.
            pending_calls = []
            for backend, counters in status.items():
                pending_calls += _list_pending(backend, counters, self._stalled_since)
            self._calls = pending_calls
            self._calls = self._read_calls(status)

    def _read_calls(self, status: dict[str, Any]) -> list[CurrentCollective]:
        """Read the entries of all flight recorders, and return the collective that each group is in.

        Args:
            status: For each backend, the counters of each group by the group's ID.
        """
        now, members = time.monotonic(), _read_members()
        calls = []
        for backend, dump in self._dump_functions.items():
            entries = json.loads(dump()).get("entries", [])
            calls += find_current_collectives(backend, entries, status[backend], members, now)
        return calls


def find_current_collectives(
    backend: str, entries: list[dict[str, Any]], status: dict[str, Any], members: dict[str, list[int]], now: float
) -> list[CurrentCollective]:
    """Return the collective that each group is in: the earliest incomplete one, or the last one if all are complete.

    Args:
        backend: Name of the backend as in the name of its dump function, such as "nccl"; "fr" for gloo.
        entries: Collectives in the backend's flight recorder, oldest first.
        status: Counters of each group, by the group's ID.
        members: Global ranks of each group, by the group's name.
        now: Current time in seconds on the monotonic clock.
    """
    current: list[CurrentCollective] = []
    for name, group_entries in _group_started_collectives(backend, entries, status).items():
        last = group_entries[-1]
        is_idle = backend == _GLOO_NAME and _is_idle(status.get(str(last["pg_id"]), {}))
        incomplete = [each for each in group_entries if not each.get("retired") and each.get("state") != "completed"]
        is_inside = bool(incomplete) and not is_idle
        entry = incomplete[0] if is_inside else last
        # Convert from the system clock to the monotonic clock.
        entered = now - (time.time() - entry["time_created_ns"] / 1e9)
        current.append(
            {
                "group": name if backend == _GLOO_NAME else f"{backend}:{name}",
                "number": entry["collective_seq_id"],
                "operation": entry["profiling_name"].split(":")[-1],
                "since": round(entered, 3) if is_inside else None,
                "members": members.get(name),
            }
        )
    return current


def _group_started_collectives(
    backend: str, entries: list[dict[str, Any]], status: dict[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """Return the collectives that have started, oldest first, by the name of their process group.

    Point-to-point operations are left out. If two groups had one name, only the entries of the later one are returned.

    Args:
        backend: Name of the backend as in the name of its dump function, such as "nccl"; "fr" for gloo.
        entries: Entries of the backend's flight recorder, oldest first.
        status: Counters of each group, by the group's ID.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    # The counters of these groups mix sends and collectives, which are numbered separately, so they are not used.
    ids_with_sends = {entry["pg_id"] for entry in entries if entry.get("is_p2p")}
    for entry in entries:
        if entry.get("is_p2p"):
            continue
        has_usable_counters = backend != _GLOO_NAME and entry["pg_id"] not in ids_with_sends
        if has_usable_counters and not _is_enqueued(entry, status):
            continue
        group_entries = groups.setdefault(entry["process_group"][0], [])
        if group_entries and group_entries[-1]["pg_id"] != entry["pg_id"]:
            group_entries.clear()  # entries of an earlier group that had this name
        group_entries.append(entry)
    return groups


def _is_enqueued(entry: dict[str, Any], status: dict[str, Any]) -> bool:
    """Whether a collective in NCCL's flight recorder was enqueued, according to the counters of its group.

    NCCL's recorder lists a collective before it is enqueued, and treats an event that was never recorded as reached.

    Args:
        entry: Entry of the flight recorder.
        status: Counters of each group, by the group's ID.
    """
    last = status.get(str(entry["pg_id"]), {}).get("last_enqueued_collective")
    return last is None or int(entry["collective_seq_id"]) <= int(last)


def _is_idle(counts: dict[str, str]) -> bool:
    """Whether a group's counters show no pending collective.

    gloo's threads update the recorder out of order, so an earlier collective can be recorded as the last completed one.
    """
    return counts.get("last_enqueued_collective") == counts.get("last_completed_collective")


def _list_pending(backend: str, status: dict[str, Any], since: float) -> list[CurrentCollective]:
    """Return an entry for each group whose counters show a pending collective.

    The number, operation and members in an entry are placeholders, because the counters do not contain them.

    Args:
        backend: Name of the backend.
        status: Counters of each group, by the group's ID.
        since: Time on the monotonic clock at which the collectives stopped advancing.
    """
    return [
        CurrentCollective(
            group=f"{backend}#{group_id}", number=0, operation="a collective", since=round(since, 3), members=None
        )
        for group_id, counts in status.items()
        if not _is_idle(counts)
    ]


def _get_c_module() -> Any:
    """Return torch's C++ module of process groups, or None if the program has not imported it."""
    return sys.modules.get("torch._C._distributed_c10d")


def _get_c10d_module() -> Any:
    """Return the Python module of process groups, or None if the program has not imported it."""
    return sys.modules.get("torch.distributed.distributed_c10d")


def _has_process_group() -> bool:
    is_initialized = getattr(_get_c10d_module(), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


def _find_dump_functions() -> dict[str, Any]:
    """Return a dict from backend name to the torch function that dumps the backend's flight recorder."""
    module = _get_c_module()
    functions = {}
    for name in dir(module):
        match = _DUMPS.fullmatch(name)
        if match is not None:
            functions[match[1]] = getattr(module, name)
    return functions


def _read_members() -> dict[str, list[int]]:
    """Return a dict from process group name to the group's global ranks, in ascending order.

    The dict is empty if torch.distributed has not been imported. Groups that another thread destroys meanwhile are left
    out.
    """
    world = getattr(_get_c10d_module(), "_world", None)
    names, ranks_by_group = getattr(world, "pg_names", {}), getattr(world, "pg_group_ranks", {})
    members = {}
    for group, name in list(names.items()):  # a copy, because another thread might create or destroy groups
        ranks = ranks_by_group.get(group)
        if ranks is not None:
            members[name] = sorted(ranks)
    return members


def reset_recorders() -> None:
    """Clear the flight recorders before process groups are aborted.

    After the abort, the recorders' CUDA events must not be queried, which reading a recorder would do.
    """
    for name in dir(_get_c_module()):
        if name.startswith("_reset_fr_recording"):
            getattr(_get_c_module(), name)()
