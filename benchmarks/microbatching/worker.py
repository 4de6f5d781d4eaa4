"""One rank of the measurement: a loop with and without automatic micro-batching, votes, and repeated failures."""

import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

import headway
from benchmarks.timing import make_rows, summarize, time_interleaved
from headway.core.runtime.control_plane import control
from headway.extras.replay.piece_size import PieceSize

NUM_BATCHES, STEPS, WIDTH = 4, 2, 1600


class Net(torch.nn.Sequential):
    """Four layers of 1600 x 1600 (10.2 M parameters). The next `num_failures` forward passes raise an out-of-memory error."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
        super().__init__(*layers)
        self.num_failures = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply the layers, then raise an out-of-memory error if one was requested."""
        out = super().forward(rows)
        if self.num_failures:
            self.num_failures -= 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return out


def make_loop(is_automatic: bool, form: str = "loop") -> tuple[Callable[[], None], Net, Any]:
    """Return a function that passes over NUM_BATCHES batches, with its model and Accelerator.

    Args:
        is_automatic: Whether to use microbatching="auto".
        form: "loop" for a loop over micro-batches, "function" for `forward_backward`.
    """
    accelerator = headway.Accelerator(
        cpu=True, gradient_accumulation_steps=STEPS, microbatching="auto" if is_automatic else None
    )
    bare = Net()
    model, optimizer = accelerator.prepare(bare, torch.optim.Adam(bare.parameters(), lr=1e-4))
    rows = torch.randn(64, WIDTH)

    def run() -> None:
        for _ in range(NUM_BATCHES):
            if form == "function":
                accelerator.forward_backward(rows, lambda piece: model(piece).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                continue
            for piece in accelerator.microbatches(rows):
                with accelerator.accumulate(model):
                    accelerator.backward(model(piece).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()

    return run, bare, accelerator


def measure_votes(accelerator: Any) -> dict[str, Any]:
    """Measure one vote by `gather_numbers` and one over the control plane, in microseconds."""
    plane = control.current()
    values = [1.0] * 7
    votes = {
        "collectives.gather_numbers": lambda: accelerator.collectives.gather_numbers(values),
        "control plane": lambda: plane.vote(values),
    }
    results = {}
    for name, vote in votes.items():
        times = []
        for _ in range(300):
            start = time.perf_counter()
            vote()
            times.append(time.perf_counter() - start)
        results[name] = summarize(times[20:], 1e6)
    return results


def measure_memory_after_failures(run: Callable[[], None], model: Net, transaction: Any) -> list[float]:
    """Run 20 passes in each of which the first forward raises an out-of-memory error. Return the resident MiB after each pass."""
    mib = []
    for _ in range(20):
        model.num_failures = 1
        transaction.size = PieceSize()
        run()
        mib.append(round(psutil.Process().memory_info().rss / 2**20, 1))
    return mib


def main() -> None:
    """Measure all variants in turn; rank 0 writes the rows to the path in sys.argv[1]."""
    path, repeats = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    loops = {
        "plain": make_loop(False), "plain, again (A/A)": make_loop(False), "automatic": make_loop(True),
        "automatic, function": make_loop(True, "function"),
    }  # fmt: skip
    rows = make_rows(time_interleaved({name: run for name, (run, _, _) in loops.items()}, repeats), 1e3 / NUM_BATCHES)
    run, model, accelerator = loops["automatic"]
    count = accelerator.num_processes
    results = {f"{count} process(es): {name}": row for name, row in rows.items() if name != "accelerate"}
    results[f"{count} process(es): one vote, us"] = (
        json.dumps(measure_votes(accelerator)) if count > 1 else "not needed"
    )
    results[f"{count} process(es): resident MiB after each of 20 failures"] = ", ".join(
        map(str, measure_memory_after_failures(run, model, accelerator._training_step.transaction))
    )
    if accelerator.is_main_process:
        path.write_text(json.dumps(results))
    accelerator.end_training()


if __name__ == "__main__":
    main()
