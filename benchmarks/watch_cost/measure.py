"""Cost of the hang watch for a rank: an entry per collective, a progress note per update, and one heartbeat per second.

One process, CPU, one thread. The flight recorder's buffer is full, as in a long run.

`python benchmarks/run.py watch_cost` runs it, and rewrites the table in benchmarks/README.md.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.timing import get_num_repeats, make_rows, save_result, time_interleaved
from headway.common import env
from headway.core.runtime.collective_ledger import CollectiveLedger
from headway.core.runtime.flight_recorder import CurrentCollective, FlightRecorder
from headway.core.runtime.heartbeat import NUM_RECORDED, Heartbeat
from headway.core.runtime.heartbeat_file import HeartbeatFile

CALLS = 100


def repeat_call(call: Callable[[], Any]) -> Callable[[], None]:
    """Return a function that makes CALLS calls."""

    def run() -> None:
        for _ in range(CALLS):
            call()

    return run


def make_collective_entry(ledger: CollectiveLedger) -> Callable[[], None]:
    """Return a function that records the entry and the exit of a collective, as each of Headway's collectives does."""
    return lambda: ledger.record_exit(ledger.record_entry("gather"))


class DirectFlightRecorder(FlightRecorder):
    """Flight recorder that reads in the calling thread, so that the time includes its work."""

    def get_calls(self) -> list[CurrentCollective] | None:
        """Check the counters, and report no calls."""
        self.check_counters()
        return []


def make_heartbeat(file: HeartbeatFile, *, is_training: bool) -> Callable[[], None]:
    """Return a function that writes one heartbeat.

    Args:
        file: File that the heartbeat writes.
        is_training: Whether collectives make progress between heartbeats; otherwise the heartbeat reads the whole recording.
    """

    def run() -> None:
        recorder = DirectFlightRecorder()
        if not is_training:
            recorder.check_counters()  # the heartbeat then finds no progress, and reads the whole recording
        Heartbeat(file, recorder).write_beat()

    return run


def main() -> None:
    """Measure all variants in turn and write result.json."""
    torch.set_num_threads(1)
    env.set_default("TORCH_FR_BUFFER_SIZE", NUM_RECORDED)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(2000):
        dist.all_reduce(torch.ones(1))
    file, ledger = HeartbeatFile(), CollectiveLedger()
    passes = {
        "reading the clock": repeat_call(time.monotonic),
        "reading the clock, again (A/A)": repeat_call(time.monotonic),
        "recording one collective": repeat_call(make_collective_entry(ledger)),
        "noting the progress of an update": repeat_call(lambda: file.note_progress(3, 1)),
        "a heartbeat while training": repeat_call(make_heartbeat(file, is_training=True)),
        "a heartbeat that finds stalled collectives": repeat_call(make_heartbeat(file, is_training=False)),
    }
    rows = make_rows(time_interleaved(passes, get_num_repeats(60)), 1e6 / CALLS)
    rows.pop("accelerate", None)  # Accelerate has no such watch
    save_result("watch_cost", "us", rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
