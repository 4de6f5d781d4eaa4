"""What the hang watch costs a rank: a mark per collective, a note per update, and one heartbeat a second.

One process, CPU, one thread; the flight recorder's buffer is full.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.timing import interleave, num_repeats, rows_of, save
from headway.common import env
from headway.core.runtime.collective_ledger import CollectiveLedger
from headway.core.runtime.flight_recorder import Call, FlightRecorder
from headway.core.runtime.heartbeat import NUM_RECORDED, Heartbeat
from headway.core.runtime.pulse import HeartbeatFile

CALLS = 100


def many(call: Callable[[], Any]) -> Callable[[], None]:
    """`call`, CALLS times."""

    def run() -> None:
        for _ in range(CALLS):
            call()

    return run


def mark(ledger: CollectiveLedger) -> Callable[[], None]:
    """What each collective of Headway's does."""
    return lambda: ledger.record_exit(ledger.record_entry("gather"))


class Direct(FlightRecorder):
    """Looks in the heartbeat's own thread, so that both are timed."""

    def get_calls(self) -> list[Call] | None:
        """What a look finds."""
        self.check_counters()
        return []


def beat(pulse: HeartbeatFile, *, is_training: bool) -> Callable[[], None]:
    """One heartbeat, as it is between collectives on the move, or once they stand still."""

    def run() -> None:
        recorder = Direct()
        if not is_training:
            recorder.check_counters()  # the next look finds that nothing has moved, and reads the whole recording
        Heartbeat(pulse, recorder).write_beat()

    return run


def main() -> None:
    """Measure and save."""
    torch.set_num_threads(1)
    env.set_default("TORCH_FR_BUFFER_SIZE", NUM_RECORDED)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(2000):
        dist.all_reduce(torch.ones(1))
    pulse, ledger = HeartbeatFile(), CollectiveLedger()
    passes = {
        "reading the clock": many(time.monotonic),
        "reading the clock, again (A/A)": many(time.monotonic),
        "a collective's mark": many(mark(ledger)),
        "a note of progress": many(lambda: pulse.note_progress(3, 1)),
        "a heartbeat while training": many(beat(pulse, is_training=True)),
        "a heartbeat that finds collectives standing still": many(beat(pulse, is_training=False)),
    }
    rows = rows_of(interleave(passes, num_repeats(60)), 1e6 / CALLS)
    rows.pop("accelerate", None)  # it has no such watch
    save("watch_cost", "us", rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
