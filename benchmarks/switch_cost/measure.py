"""Cost of a micro-batch when a script imports Headway as `accelerate`, compared with the same loop under Headway's own name.

It also times `headway compat` on the first 300 files of the installed packages that mention Accelerate.

`python benchmarks/run.py switch_cost` runs it, and rewrites the table in benchmarks/README.md.
"""

import logging
import subprocess
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch

import headway
from benchmarks.step_cost.measure import NUM_BATCHES, STEPS, make_prepared_loop
from benchmarks.timing import find_command, get_num_repeats, make_rows, save_result, time_interleaved
from headway.compat.accelerate.accelerator import AccelerateAccelerator

NUM_FILES = 300


def make_headway_loop() -> Callable[[], None]:
    """Return the floor: the loop with `headway.Accelerator`."""
    return make_prepared_loop(headway.Accelerator(gradient_accumulation_steps=STEPS, cpu=True))


def time_compat_command() -> str:
    """Time `headway compat`, and return the result as a sentence."""
    modules = sorted(Path(torch.__file__).parents[1].rglob("*.py"))
    files = list(islice((path for path in modules if b"accelerate" in path.read_bytes()), NUM_FILES))
    lines = sum(len(path.read_bytes().splitlines()) for path in files)
    start = time.perf_counter()
    subprocess.run([find_command("headway"), "compat", *map(str, files)], stdout=subprocess.DEVNULL)
    return f"`headway compat` checks {len(files)} files ({lines:,} lines) in {time.perf_counter() - start:.1f} s"


def main() -> None:
    """Measure all variants in turn and write result.json."""
    repeats = get_num_repeats(100)
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    switched = AccelerateAccelerator(gradient_accumulation_steps=STEPS, cpu=True)
    passes = {
        "headway": make_headway_loop(),
        "headway, again (A/A)": make_headway_loop(),
        "headway imported as `accelerate`": make_prepared_loop(switched),
    }
    save_result(
        "switch_cost",
        "us per micro-batch",
        make_rows(time_interleaved(passes, repeats), 1e6 / NUM_BATCHES),
        time_compat_command(),
    )


if __name__ == "__main__":
    main()
