"""Stand-in for the JSON of `_dump_nccl_trace_json`, with the fields of `dump_json` in torch 2.13's FlightRecorderDetail.hpp.

It was not recorded, because no machine with a GPU was available. The dump without entries equals the one that torch
2.11.0+cu130 writes on a machine without a GPU.
"""

import json
import time
from typing import Any


def make_entry(number: int, operation: str, state: str = "scheduled", *, group: str = "0", pg_id: int = 0,
          age: float = 0.0, is_p2p: bool = False) -> dict[str, Any]:  # fmt: skip
    """Return the entry of one operation, enqueued `age` seconds ago.

    Without TORCH_NCCL_ENABLE_TIMING, an operation is "scheduled" until it is completed.
    """
    now = time.time_ns() - int(age * 1e9)
    is_complete = state == "completed"
    return {
        "record_id": number - 1, "pg_id": pg_id, "process_group": [group, "default_pg" if group == "0" else "undefined"],
        "thread_name": "python", "thread_id": "140239405471552", "collective_seq_id": 0 if is_p2p else number,
        "p2p_seq_id": number if is_p2p else 0, "op_id": number, "profiling_name": f"nccl:{operation}", "time_created_ns": now,
        "input_sizes": [[4096]], "input_dtypes": ["Float"], "output_sizes": [[4096]], "output_dtypes": ["Float"],
        "state": state, "time_discovered_started_ns": 0,
        "time_discovered_completed_ns": now + 10**6 if is_complete else 0,
        "retired": is_complete, "timeout_ms": 600000, "is_p2p": is_p2p,
    }  # fmt: skip


def make_content(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the whole dump. The counters equal those of the watchdog thread, which updates them every tenth of a second."""
    status = {
        str(one["pg_id"]): {
            "last_enqueued_collective": str(one["op_id"]),
            "last_started_collective": "-1",
            "last_completed_collective": str(
                max(
                    (
                        each["op_id"]
                        for each in entries
                        if each["pg_id"] == one["pg_id"] and each["state"] == "completed"
                    ),
                    default=-1,
                )
            ),
        }
        for one in entries
    }
    found = {
        "version": "2.10", "comm_lib_version": "2.27.7", "nccl_comm_state": {},
        "pg_config": {one["process_group"][0]: {"name": one["process_group"][0], "desc": one["process_group"][1],
                                                "ranks": "[0, 1]"} for one in entries},
        "pg_status": status,
    }  # fmt: skip
    return {**found, "entries": entries} if entries else found


def make_dump(entries: list[dict[str, Any]], with_collectives: bool = True) -> bytes:
    """Return the dump as bytes. The key `entries` is left out if there are none or `with_collectives` is False."""
    found = make_content(entries)
    if not with_collectives:
        found.pop("entries", None)
    return json.dumps(found).encode()
