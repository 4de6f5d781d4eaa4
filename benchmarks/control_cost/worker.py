"""One rank of the measurement: votes, compared with a round trip to the store and gloo's all_reduce of one float."""

import json
import logging
import struct
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

import headway
from benchmarks.timing import make_rows, time_interleaved
from headway.core.runtime import process
from headway.core.runtime.control_plane import control

NUM_CALLS = 100


def repeat_call(call: Callable[[], object]) -> Callable[[], None]:
    """Return a function that makes NUM_CALLS calls in a row."""

    def run() -> None:
        for _ in range(NUM_CALLS):
            call()

    return run


def make_all_to_all_vote(rank: int, world_size: int) -> Callable[[], object]:
    """Return the alternative vote: each rank writes a key and reads those of all ranks, so world_size² values travel."""
    store, numbers, value = process.get_control_link().store, count(), struct.pack("<4d", 0, 0, 0, 0)

    def vote() -> object:
        number = next(numbers)
        store.set(f"bench/{number}/{rank}", value)
        if number > 1:
            store.delete_key(f"bench/{number - 2}/{rank}")
        return store.multi_get([f"bench/{number}/{other}" for other in range(world_size)])

    return vote


def main() -> None:
    """Measure all variants in turn; rank 0 writes the rows to the path in sys.argv[1]."""
    path, repeats = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    accelerator = headway.Accelerator(cpu=True)
    plane, rank, size = control.current(), accelerator.process_index, accelerator.num_processes
    store, number = process.get_control_link().store, torch.zeros(1)
    passes = {
        "round trip to the store": lambda: store.add(f"own/{rank}", 1),
        "round trip to the store, again (A/A)": lambda: store.add(f"own/{rank}", 1),
        "vote of 4 flags, all zero": lambda: plane.vote((0.0, 0.0, 0.0, 0.0), "any"),
        "vote of 4 values": lambda: plane.vote((1.0, rank, 0.5, -1.0), "max"),
        "vote where each rank reads all keys (alternative, not used)": make_all_to_all_vote(rank, size),
        "gloo all_reduce of one float": lambda: dist.all_reduce(number),
        "collectives.reduce_numbers of 4 numbers": lambda: accelerator.collectives.reduce_numbers(
            (1.0, rank, 0.5, -1.0), "max"
        ),
        "note_progress": lambda: control.note_progress(1, 2),
    }
    rows = make_rows(
        time_interleaved({name: repeat_call(call) for name, call in passes.items()}, repeats), 1e6 / NUM_CALLS
    )
    rows.pop("accelerate", None)
    if accelerator.is_main_process:
        path.write_text(json.dumps({f"{size} ranks: {name}": row for name, row in rows.items()}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
