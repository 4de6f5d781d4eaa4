"""One rank of the measurement: the same loop with and without automatic micro-batching, votes, and failures in a row."""

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
from benchmarks.timing import interleave, rows_of, summary
from headway.core.runtime.control_plane import control
from headway.extras.replay.piece_size import PieceSize

NUM_BATCHES, STEPS, WIDTH = 4, 2, 1600


class Net(torch.nn.Sequential):
    """Four layers of 1600 x 1600: 10.2 M parameters. Runs out of memory when told to."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
        super().__init__(*layers)
        self.num_failures = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Fail once where asked."""
        out = super().forward(rows)
        if self.num_failures:
            self.num_failures -= 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return out


def loop(is_automatic: bool, form: str = "loop") -> tuple[Callable[[], None], Net, Any]:
    """A pass over a few batches; the model, and the Accelerator."""
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


def votes(accelerator: Any) -> dict[str, Any]:
    """Microseconds of a vote by the door's handshake and by the control plane."""
    plane = control.current()
    values = [1.0] * 7
    ways = {"door": lambda: accelerator.collectives.gather_numbers(values), "control plane": lambda: plane.vote(values)}
    found = {}
    for name, vote in ways.items():
        times = []
        for _ in range(300):
            start = time.perf_counter()
            vote()
            times.append(time.perf_counter() - start)
        found[name] = summary(times[20:], 1e6)
    return found


def failures(run: Callable[[], None], model: Net, transaction: Any) -> list[float]:
    """Resident MiB after each of 20 passes with one failure, each in a whole batch."""
    found = []
    for _ in range(20):
        model.num_failures = 1
        transaction.size = PieceSize()
        run()
        found.append(round(psutil.Process().memory_info().rss / 2**20, 1))
    return found


def main() -> None:
    """Measure; rank 0 writes the rows to the path given."""
    path, repeats = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    made = {
        "plain": loop(False), "plain, again (A/A)": loop(False), "automatic": loop(True),
        "automatic, function": loop(True, "function"),
    }  # fmt: skip
    rows = rows_of(interleave({name: run for name, (run, _, _) in made.items()}, repeats), 1e3 / NUM_BATCHES)
    run, model, accelerator = made["automatic"]
    count = accelerator.num_processes
    told = {f"{count} process(es): {name}": row for name, row in rows.items() if name != "accelerate"}
    told[f"{count} process(es): one vote, us"] = json.dumps(votes(accelerator)) if count > 1 else "none is needed"
    told[f"{count} process(es): MiB after each of 20 failures"] = ", ".join(
        map(str, failures(run, model, accelerator._training_step.transaction))
    )
    if accelerator.is_main_process:
        path.write_text(json.dumps(told))
    accelerator.end_training()


if __name__ == "__main__":
    main()
