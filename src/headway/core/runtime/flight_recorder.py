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
from typing import Any

_DUMPS = re.compile(r"_dump_(\w+)_trace_json")

_CPU = "fr"
"""Part of the name of torch's function `_dump_fr_trace_json` that identifies gloo's recorder.

The function for an accelerator's recorder contains the name of the backend instead, such as nccl or xccl.
"""

Call = dict[str, Any]
"""A collective of one process group, as a dict.

Its keys are "group", "number", "operation", "since" (time at which it was entered; None if the rank is not inside
it) and "members" (None if unknown).
"""


class FlightRecorder:
    """Background reader of the flight recorders of all backends in this process."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._over = threading.Event()
        self._status = ""
        self._still_since = 0.0
        self._calls: list[Call] | None = None
        self._dumps: dict[str, Any] = {}
        self._thread: threading.Thread | None = None

    def get_calls(self) -> list[Call] | None:
        """Return the current collective of each group as last read, and request a new reading without waiting for it.

        Returns:
            The collectives; an empty list if there is no process group. None while collectives advance, which means
                that the process does not hang, and before the first reading.
        """
        if not _is_joined():
            return []
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="headway-recorder", daemon=True)
            self._thread.start()
        self._asked.set()
        return self._calls

    def stop(self) -> None:
        """Stop the background thread that reads the recorders."""
        self._over.set()
        self._asked.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5)

    def _run(self) -> None:
        while not self._over.is_set():
            self._asked.wait()
            self._asked.clear()
            if not self._over.is_set() and _is_joined():
                self.check_counters()

    def check_counters(self) -> None:
        """Check the recorders' counters once.

        If they have not changed since the last check, read all entries, which takes milliseconds.
        """
        if not self._dumps:
            self._dumps = _find_dump_functions()
        status = {engine: json.loads(dump(False)).get("pg_status", {}) for engine, dump in self._dumps.items()}
        former, self._status = self._status, json.dumps(status)
        if self._status != former:
            self._still_since = time.monotonic()
            self._calls = None
        elif self._calls is None:
            # Use the counters first, which query no event. If the next line blocks, they are all that is known.
            self._calls = [
                call for engine in status for call in _list_pending(engine, status[engine], self._still_since)
            ]
            self._calls = self._read_calls(status)

    def _read_calls(self, status: dict[str, Any]) -> list[Call]:
        now, members = time.monotonic(), _read_members()
        return [
            call
            for engine, dump in self._dumps.items()
            for call in find_latest(engine, json.loads(dump()).get("entries", []), status[engine], members, now)
        ]


def find_latest(
    engine: str, entries: list[dict[str, Any]], status: dict[str, Any], members: dict[str, list[int]], now: float
) -> list[Call]:
    """Return the collective that each group is in: the earliest incomplete one, or the last one if all are complete.

    Args:
        engine: Name of the backend.
        entries: Collectives in the backend's flight recorder, oldest first.
        status: Counters of each group, by the group's ID.
        members: Ranks of each group, by the group's name.
        now: Current time in seconds on the monotonic clock.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    # Status counters of these groups mix sends and collectives, which are numbered separately.
    counts_both = {entry["pg_id"] for entry in entries if entry.get("is_p2p")}
    for entry in entries:
        is_told = engine == _CPU or entry["pg_id"] in counts_both or _is_enqueued(entry, status)
        if not entry.get("is_p2p") and is_told:
            of_group = groups.setdefault(entry["process_group"][0], [])
            if of_group and of_group[-1]["pg_id"] != entry["pg_id"]:
                of_group.clear()  # entries of an earlier group that had this name
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
    # NCCL's recorder lists a collective before it is enqueued, and treats an event that was never recorded as reached.
    last = status.get(str(entry["pg_id"]), {}).get("last_enqueued_collective")
    return last is None or int(entry["collective_seq_id"]) <= int(last)


def _is_idle(counts: dict[str, str]) -> bool:
    # gloo's threads update counters out of order, so an earlier collective can be recorded as the last completed one.
    return counts.get("last_enqueued_collective") == counts.get("last_completed_collective")


def _list_pending(engine: str, status: dict[str, Any], since: float) -> list[Call]:
    """Return an entry for each group whose counters show a pending collective.

    The number, operation and members in an entry are placeholders, because the counters do not contain them.

    Args:
        engine: Name of the backend.
        status: Counters of each group, by the group's ID.
        since: Time on the monotonic clock at which the collectives stopped advancing.
    """
    unknown = {"number": 0, "operation": "a collective", "since": round(since, 3), "members": None}
    return [{"group": f"{engine}#{number}", **unknown} for number, counts in status.items() if not _is_idle(counts)]


def _get_c_module() -> Any:
    return sys.modules.get("torch._C._distributed_c10d")


def _get_c10d_module() -> Any:
    return sys.modules.get("torch.distributed.distributed_c10d")


def _is_joined() -> bool:
    is_initialized = getattr(_get_c10d_module(), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


def _find_dump_functions() -> dict[str, Any]:
    """Return a dict from backend name to the torch function that dumps the backend's flight recorder."""
    names = {name: found[1] for name in dir(_get_c_module()) if (found := _DUMPS.fullmatch(name))}
    return {engine: getattr(_get_c_module(), name) for name, engine in names.items()}


def _read_members() -> dict[str, list[int]]:
    """Return a dict from group name to the group's sorted ranks, for all groups whose ranks torch knows."""
    world = getattr(_get_c10d_module(), "_world", None)
    names, ranks = getattr(world, "pg_names", {}), getattr(world, "pg_group_ranks", {})
    # Look up once, because another thread might destroy the group meanwhile.
    return {name: sorted(found) for group, name in list(names.items()) if (found := ranks.get(group)) is not None}


def reset_recorders() -> None:
    """Clear the flight recorders before process groups are aborted.

    After the abort, the recorders' CUDA events must not be queried, which reading a recorder would do.
    """
    for name in dir(_get_c_module()):
        if name.startswith("_reset_fr_recording"):
            getattr(_get_c_module(), name)()
