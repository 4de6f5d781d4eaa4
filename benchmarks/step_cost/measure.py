"""Cost of a prepared training loop per micro-batch beyond the same loop in plain PyTorch.

One process, CPU, one thread. The model is tiny, so that the time is the library's, not the arithmetic's.

`python benchmarks/run.py step_cost` runs it, and rewrites the table in benchmarks/README.md.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.timing import HAS_ACCELERATE, get_num_repeats, make_rows, save_result, time_interleaved

NUM_BATCHES = 100
STEPS = 2


@dataclass
class Training:
    """The objects that a training loop uses, not yet prepared."""

    model: Any
    optimizer: Any
    loader: Any
    scheduler: Any

    def prepare(self, accelerator: Any) -> tuple[Any, Any, Any, Any]:
        """Prepare all objects with `accelerator`, and return (model, optimizer, loader, scheduler)."""
        model, optimizer, loader, scheduler = accelerator.prepare(
            self.model, self.optimizer, self.loader, self.scheduler
        )
        return model, optimizer, loader, scheduler


def build_training() -> Training:
    """Build a tiny model with its optimizer, a loader of NUM_BATCHES batches and a schedule, alike for every loop."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows = torch.randn(NUM_BATCHES * 4, 16)
    loader = DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=4)
    return Training(model, optimizer, loader, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0))


def make_plain_loop() -> Callable[[], None]:
    """Return the floor: a function that passes over the loader in plain PyTorch."""
    training = build_training()
    model, optimizer, loader, scheduler = training.model, training.optimizer, training.loader, training.scheduler

    def run() -> None:
        for index, (inputs, targets) in enumerate(loader):
            loss = torch.nn.functional.mse_loss(model(inputs), targets) / STEPS
            loss.backward()
            if index % STEPS == STEPS - 1:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return run


def compute_loss(model: Any, batch: Any) -> torch.Tensor:
    """Return the loss of a batch (inputs, targets)."""
    inputs, targets = batch
    return torch.nn.functional.mse_loss(model(inputs), targets)


def make_prepared_loop(
    accelerator: Any,
    training: Training | None = None,
    compute_loss: Callable[[Any, Any], torch.Tensor] = compute_loss,
) -> Callable[[], None]:
    """Return a function that passes over the loader with `accelerator`, in calls that Headway and Accelerate share.

    Args:
        accelerator: Accelerator of either library.
        training: Objects to prepare; by default those of `build_training`.
        compute_loss: Function of the model and a batch that returns the loss.
    """
    model, optimizer, loader, scheduler = (training or build_training()).prepare(accelerator)

    def run() -> None:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(compute_loss(model, batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return run


def main() -> None:
    """Measure all variants in turn and write result.json."""
    repeats = get_num_repeats(100)
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    import headway

    passes = {
        "by hand": make_plain_loop(),
        "by hand, again (A/A)": make_plain_loop(),
        "headway": make_prepared_loop(headway.Accelerator(gradient_accumulation_steps=STEPS, cpu=True)),
    }
    if HAS_ACCELERATE:
        import accelerate

        passes["accelerate"] = make_prepared_loop(accelerate.Accelerator(gradient_accumulation_steps=STEPS, cpu=True))
    rows = make_rows(time_interleaved(passes, repeats), 1e6 / NUM_BATCHES)
    if HAS_ACCELERATE:
        ours, theirs = (rows[name]["added cpu"]["median"] for name in ("headway", "accelerate"))
        rows["headway"]["share of Accelerate"] = round(ours / theirs, 3)
    save_result("step_cost", "us per micro-batch", rows)


if __name__ == "__main__":
    main()
