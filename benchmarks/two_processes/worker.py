"""One rank of the measurement on two processes: micro-steps through DDP, and the cost of agreeing before a gather."""

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
from benchmarks.step_cost.measure import NUM_BATCHES, STEPS, parts, prepared
from benchmarks.timing import HAS_ACCELERATE, interleave, rows_of

NUM_GATHERS = 100


def by_hand() -> Callable[[], None]:
    """torch's DistributedDataParallel with no_sync, on half of the batches."""
    bare, optimizer, loader, scheduler = parts()
    model, num_own = DistributedDataParallel(bare), NUM_BATCHES // 2

    def run() -> None:
        for index, (inputs, targets) in enumerate(loader):
            if index >= num_own:
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


def gathers(gather: Callable[[torch.Tensor], Any]) -> Callable[[], None]:
    """Many gathers of a small tensor."""
    tensor = torch.zeros(16, 10)

    def run() -> None:
        for _ in range(NUM_GATHERS):
            gather(tensor)

    return run


def plain_gather(tensor: torch.Tensor) -> torch.Tensor:
    """What a script writes where it knows all shapes to be equal."""
    pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, tensor)
    return torch.cat(pieces)


def main() -> None:
    """Measure; rank 0 writes the rows to the path given."""
    path, repeats = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    own = headway.Accelerator(gradient_accumulation_steps=STEPS, cpu=True)
    steps = {
        "DDP": by_hand(), "DDP, again (A/A)": by_hand(), "headway": prepared(own),
    }  # fmt: skip
    exchange = {
        "all_gather": gathers(plain_gather), "all_gather, again (A/A)": gathers(plain_gather),
        "headway": gathers(own.gather),
    }  # fmt: skip
    if HAS_ACCELERATE:
        import accelerate

        peer = accelerate.Accelerator(gradient_accumulation_steps=STEPS, cpu=True)
        steps["accelerate"], exchange["accelerate"] = prepared(peer), gathers(peer.gather)
    per_step = rows_of(interleave(steps, repeats), 1e6 / (NUM_BATCHES // 2))
    per_gather = rows_of(interleave(exchange, repeats), 1e6 / NUM_GATHERS)
    rows = {f"micro-step: {name}": row for name, row in per_step.items()}
    rows |= {f"gather: {name}": row for name, row in per_gather.items()}
    if own.is_main_process:
        path.write_text(json.dumps(rows))
    own.end_training()


if __name__ == "__main__":
    main()
