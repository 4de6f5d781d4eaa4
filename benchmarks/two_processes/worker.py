"""One rank of the measurement: micro-steps with DDP, and the cost of checking shapes before a gather."""

import json
import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import headway
from benchmarks.step_cost.measure import NUM_BATCHES, STEPS, build_training, make_prepared_loop
from benchmarks.timing import HAS_ACCELERATE, make_rows, time_interleaved

NUM_GATHERS = 100


def make_plain_loop() -> Callable[[], None]:
    """Return a function that passes over half of the batches with torch's DistributedDataParallel and no_sync."""
    training = build_training()
    model, optimizer, scheduler = DistributedDataParallel(training.model), training.optimizer, training.scheduler
    num_own_batches = NUM_BATCHES // 2

    def run() -> None:
        for index, (inputs, targets) in enumerate(training.loader):
            if index >= num_own_batches:
                break
            is_last = index % STEPS == STEPS - 1
            with nullcontext() if is_last else model.no_sync():
                (torch.nn.functional.mse_loss(model(inputs), targets) / STEPS).backward()
            if is_last:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return run


def make_gathers(gather: Callable[[torch.Tensor], Any]) -> Callable[[], None]:
    """Return a function that gathers a small tensor NUM_GATHERS times."""
    tensor = torch.zeros(16, 10)

    def run() -> None:
        for _ in range(NUM_GATHERS):
            gather(tensor)

    return run


def gather_plainly(tensor: torch.Tensor) -> torch.Tensor:
    """Gather as a script does that knows all shapes to be equal."""
    pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, tensor)
    return torch.cat(pieces)


def main() -> None:
    """Measure all variants in turn; rank 0 writes the rows to the path in sys.argv[1]."""
    path, repeats = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    ours = headway.Accelerator(gradient_accumulation_steps=STEPS, cpu=True)
    steps = {
        "DDP": make_plain_loop(), "DDP, again (A/A)": make_plain_loop(), "headway": make_prepared_loop(ours),
    }  # fmt: skip
    gathers = {
        "all_gather": make_gathers(gather_plainly), "all_gather, again (A/A)": make_gathers(gather_plainly),
        "headway": make_gathers(ours.gather),
    }  # fmt: skip
    if HAS_ACCELERATE:
        import accelerate

        theirs = accelerate.Accelerator(gradient_accumulation_steps=STEPS, cpu=True)
        steps["accelerate"], gathers["accelerate"] = make_prepared_loop(theirs), make_gathers(theirs.gather)
    per_step = make_rows(time_interleaved(steps, repeats), 1e6 / (NUM_BATCHES // 2))
    per_gather = make_rows(time_interleaved(gathers, repeats), 1e6 / NUM_GATHERS)
    rows = {f"micro-step: {name}": row for name, row in per_step.items()}
    rows |= {f"gather: {name}": row for name, row in per_gather.items()}
    if ours.is_main_process:
        path.write_text(json.dumps(rows))
    ours.end_training()


if __name__ == "__main__":
    main()
