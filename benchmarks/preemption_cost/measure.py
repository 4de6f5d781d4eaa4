"""Cost of watching for a preemption signal: a check before each batch, and a poll of the background thread five times a second.

One process, CPU, one thread. The poll asks a real store over loopback, as on two ranks.

`python benchmarks/run.py preemption_cost` runs it, and rewrites the table in benchmarks/README.md.
"""

import logging
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import headway
from benchmarks.timing import get_num_repeats, make_rows, save_result, time_interleaved
from headway.core.runtime.control_plane.control import Control
from headway.core.runtime.control_plane.stopping import StopAgreement
from headway.core.runtime.control_plane.store import StoreAddress, StoreLink, start_store

CALLS = 100


def repeat_call(call: Callable[[], Any]) -> Callable[[], None]:
    """Return a function that makes CALLS calls."""

    def run() -> None:
        for _ in range(CALLS):
            call()

    return run


def make_loop(folder: str, preemption: bool) -> Callable[[], None]:
    """Return a function that runs CALLS micro-batches of a tiny model, two per update, in a run with a checkpoint folder."""
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
    """Measure all variants in turn and write result.json."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    server = start_store("127.0.0.1")
    link = StoreLink(StoreAddress("127.0.0.1", server.port, "bench"), timedelta(seconds=10))
    stopping = StopAgreement(Control(0, 2, link, timedelta(seconds=10)), (), None, "bench")
    with tempfile.TemporaryDirectory() as folder:
        passes = {
            "a micro-batch, preemption off": make_loop(f"{folder}/a", False),
            "a micro-batch, preemption off, again (A/A)": make_loop(f"{folder}/b", False),
            "a micro-batch, preemption on": make_loop(f"{folder}/c", True),
            "the check before a batch": repeat_call(lambda: stopping.check(1, lambda: ("", False))),
            "a poll of the background thread (five per second)": repeat_call(stopping._check_for_request),
        }
        rows = make_rows(time_interleaved(passes, get_num_repeats(100)), 1e6 / CALLS)
    rows.pop("accelerate", None)  # Accelerate has no such feature
    save_result("preemption_cost", "us", rows)


if __name__ == "__main__":
    main()
