"""What a micro-batch costs under Accelerate's name beside the same loop under Headway's own, on one process.

Beside it, how long `headway compat` takes for the first 300 files of the installed packages that speak of Accelerate.
"""

import logging
import subprocess
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch

import headway
from benchmarks.step_cost.measure import NUM_BATCHES, STEPS, prepared
from benchmarks.timing import interleave, num_repeats, rows_of, save, tool
from headway.compat.accelerate.accelerator import AccelerateAccelerator

NUM_FILES = 300


def own() -> Callable[[], None]:
    """The floor: the loop under Headway's own name."""
    return prepared(headway.Accelerator(gradient_accumulation_steps=STEPS, cpu=True))


def answering() -> str:
    """How long `headway compat` takes."""
    every = sorted(Path(torch.__file__).parents[1].rglob("*.py"))
    files = list(islice((path for path in every if b"accelerate" in path.read_bytes()), NUM_FILES))
    lines = sum(len(path.read_bytes().splitlines()) for path in files)
    begin = time.perf_counter()
    subprocess.run([tool("headway"), "compat", *map(str, files)], stdout=subprocess.DEVNULL)
    return f"`headway compat` answers for {len(files)} files ({lines:,} lines) in {time.perf_counter() - begin:.1f} s"


def main() -> None:
    """Measure and save."""
    repeats = num_repeats(100)
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    switched = AccelerateAccelerator(gradient_accumulation_steps=STEPS, cpu=True)
    passes = {"headway": own(), "headway, again (A/A)": own(), "under Accelerate's name": prepared(switched)}
    save("switch_cost", "us per micro-batch", rows_of(interleave(passes, repeats), 1e6 / NUM_BATCHES), answering())


if __name__ == "__main__":
    main()
