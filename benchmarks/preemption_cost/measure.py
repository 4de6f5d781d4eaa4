"""What it costs a rank to be ready to stop: a check before each batch, and a look of its thread every fifth of a second.

One process, CPU, one thread; the look asks a real store over loopback, as on two ranks.
"""

import logging
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import headway
from benchmarks.timing import interleave, num_repeats, rows_of, save
from headway.core.runtime.control_plane.control import Control
from headway.core.runtime.control_plane.stopping import StopAgreement
from headway.core.runtime.control_plane.store import StoreAddress, StoreLink, start_store

CALLS = 100


def many(call: Callable[[], Any]) -> Callable[[], None]:
    """`call`, CALLS times."""

    def run() -> None:
        for _ in range(CALLS):
            call()

    return run


def loop(folder: str, preemption: bool) -> Callable[[], None]:
    """CALLS micro-batches of a tiny model, two to an update, in a run whose checkpoints have a place."""
    torch.manual_seed(0)
    project = headway.ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator = headway.Accelerator(
        cpu=True, gradient_accumulation_steps=2, project_config=project, preemption=preemption
    )
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    rows = torch.randn(CALLS * 4, 16)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1e-3),
        DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=4),
    )  # fmt: skip

    def run() -> None:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()

    return run


def main() -> None:
    """Measure and save."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    server = start_store("127.0.0.1")
    link = StoreLink(StoreAddress("127.0.0.1", server.port, "bench"), timedelta(seconds=10))
    stopping = StopAgreement(Control(0, 2, link, timedelta(seconds=10)), (), None, "bench")
    with tempfile.TemporaryDirectory() as folder:
        passes = {
            "a micro-batch, preemption off": loop(f"{folder}/a", False),
            "a micro-batch, preemption off, again (A/A)": loop(f"{folder}/b", False),
            "a micro-batch, preemption on": loop(f"{folder}/c", True),
            "an idle check": many(lambda: stopping.check(1, lambda: ("", False))),
            "a look of the thread (five a second)": many(stopping._look),
        }
        rows = rows_of(interleave(passes, num_repeats(100)), 1e6 / CALLS)
    rows.pop("accelerate", None)  # it has nothing of the kind
    save("preemption_cost", "us", rows)


if __name__ == "__main__":
    main()
