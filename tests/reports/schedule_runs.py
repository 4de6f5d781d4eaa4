"""Train with schedules whose lengths were computed in several ways, and return the warnings."""

import logging
from typing import Any

import torch
from torch.optim import lr_scheduler

NUM_ROWS = 36
"""9 batches of 4 rows. Each of 2 ranks reads 5 batches."""

SCHEDULES = {
    "LinearLR": lambda o, n: lr_scheduler.LinearLR(o, 1.0, 0.0, total_iters=n),
    "OneCycleLR": lambda o, n: lr_scheduler.OneCycleLR(o, 0.1, total_steps=n),
    "CosineAnnealingLR": lambda o, n: lr_scheduler.CosineAnnealingLR(o, T_max=n),
    "PolynomialLR": lambda o, n: lr_scheduler.PolynomialLR(o, total_iters=n),
    "SequentialLR": lambda o, n: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.CosineAnnealingLR(o, n - 2)], [2]
    ),
    "ChainedScheduler": lambda o, n: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.PolynomialLR(o, total_iters=n)]
    ),
}


class WarningRecorder(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def make_schedule(name: str, optimizer: Any, length: int) -> Any:
    if name == "transformers":
        from transformers import get_linear_schedule_with_warmup

        return get_linear_schedule_with_warmup(optimizer, 2, length)
    return SCHEDULES[name](optimizer, length)


def train(name: str, count: str, num_epochs: int, kind: str = "native", **options: Any) -> tuple[list[str], list[str]]:
    """Return the warnings about the schedule before the first update, and those of the whole run.

    Args:
        name: Key of SCHEDULES, or "transformers".
        count: How the length is computed: from the loader "after" or "before" prepare, "times" (after, times the processes),
            "together" (before, all prepared in one call), or "steps=N".
        num_epochs: Number of epochs to compute the length for, and to train.
        kind: "native" or "accelerate".
        options: Arguments of the Accelerator.
    """
    from headway import Accelerator
    from headway.compat.accelerate.accelerator import AccelerateAccelerator

    accelerator: Any = (AccelerateAccelerator if kind == "accelerate" else Accelerator)(cpu=True, **options)
    recorder = WarningRecorder()
    logging.getLogger("headway").addHandler(recorder)
    dataset = torch.utils.data.TensorDataset(torch.ones(NUM_ROWS, 2))
    model, loader = torch.nn.Linear(2, 1), torch.utils.data.DataLoader(dataset, batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = accelerator.gradient_accumulation_steps
    before = num_epochs * -(-len(loader) // steps)
    if count == "together":
        schedule = make_schedule(name, optimizer, before)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        after = num_epochs * -(-len(loader) // steps)
        length = {"after": after, "before": before, "times": after * accelerator.num_processes}.get(count)
        length = int(count.removeprefix("steps=")) if length is None else length
        schedule = accelerator.prepare(make_schedule(name, getattr(optimizer, "optimizer", optimizer), length))
    at_prepare = [line for line in recorder.lines if "_data_shards" in line]
    for _ in range(num_epochs):
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).sum())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    logging.getLogger("headway").removeHandler(recorder)
    return at_prepare, [line for line in recorder.lines if "_data_shards" in line]


def train_each(cases: list[tuple[Any, ...]]) -> list[tuple[list[str], list[str]]]:
    """Run the cases one after another in this process. Warnings that are given once are reset after each case."""
    from headway.common import scope
    from headway.log import OnceFilter

    out = []
    for name, count, num_epochs, kind, options in cases:
        out.append(train(name, count, num_epochs, kind, **options))
        scope.drop(OnceFilter)
    return out
