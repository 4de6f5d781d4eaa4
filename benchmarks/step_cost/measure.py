"""What a prepared training loop costs per micro-batch beyond the same loop written by hand.

One process, CPU, one thread; a tiny model, so that the library and not the arithmetic is what is measured.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.timing import HAS_ACCELERATE, interleave, num_repeats, rows_of, save

NUM_BATCHES = 100
STEPS = 2


def parts() -> tuple[Any, ...]:
    """Model, optimizer, loader, schedule: the same for every loop."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows = torch.randn(NUM_BATCHES * 4, 16)
    loader = DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=4)
    return model, optimizer, loader, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def by_hand() -> Callable[[], None]:
    """The floor."""
    model, optimizer, loader, scheduler = parts()

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


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    """The loss of those parts."""
    inputs, targets = batch
    return torch.nn.functional.mse_loss(model(inputs), targets)


def prepared(
    accelerator: Any, made: tuple[Any, ...] | None = None, loss_of: Callable[[Any, Any], torch.Tensor] = loss_of
) -> Callable[[], None]:
    """The same loop through `accelerator`, by the words that both libraries share; with other parts where they are given."""
    model, optimizer, loader, scheduler = accelerator.prepare(*(made or parts()))

    def run() -> None:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return run


def main() -> None:
    """Measure and save."""
    repeats = num_repeats(100)
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    import headway

    passes = {
        "by hand": by_hand(),
        "by hand, again (A/A)": by_hand(),
        "headway": prepared(headway.Accelerator(gradient_accumulation_steps=STEPS, cpu=True)),
    }
    if HAS_ACCELERATE:
        import accelerate

        passes["accelerate"] = prepared(accelerate.Accelerator(gradient_accumulation_steps=STEPS, cpu=True))
    rows = rows_of(interleave(passes, repeats), 1e6 / NUM_BATCHES)
    if HAS_ACCELERATE:
        ours, theirs = (rows[name]["added cpu"]["median"] for name in ("headway", "accelerate"))
        rows["headway"]["share of Accelerate"] = round(ours / theirs, 3)
    save("step_cost", "us per micro-batch", rows)


if __name__ == "__main__":
    main()
