"""The clock on two processes: a schedule traces the curve of the single-process loop, by whichever rule it was counted."""

import logging
import traceback
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, DataLoaderConfiguration
from tests.distributed.ranks import run_ranks


class Lines(logging.Handler):
    """Collects what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def curve(num_rows: int = 20, length: int = 100, **options: Any) -> list[float]:
    """The learning rate after each update of one epoch; it falls by 1 a tick from `length`."""
    accelerator = Accelerator(cpu=True, **options)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(length))
    schedule = LinearLR(optimizer, 1.0, 0.0, total_iters=length)
    loader = DataLoader(TensorDataset(torch.ones(num_rows, 1)), batch_size=2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    rates = []
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).mean())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                rates.append(round(schedule.get_last_lr()[0], 6))
    return rates


def per_process() -> None:
    """20 rows in batches of 2: the single process makes 10 updates, two make 5 with two ticks each."""
    assert curve() == [98, 96, 94, 92, 90]
    assert curve(gradient_accumulation_steps=2) == [98, 96, 94]


def split_batches() -> None:
    """The batch is the global one, so there are as many updates as on a single process."""
    assert curve(split_batches=True) == [99, 98, 97, 96, 95, 94, 93, 92, 91, 90]
    assert curve(split_batches=True, gradient_accumulation_steps=4) == [99, 98, 97]
    assert curve(split_batches=True, gradient_accumulation_steps=4, adjust_scheduler_to_accumulation=True) == [
        96,
        92,
        90,
    ]


def micro_batches() -> None:
    """Counted in the 10 micro-batches of the single process; the short last window ticks by its real length."""
    assert curve(adjust_scheduler_to_accumulation=True) == [98, 96, 94, 92, 90]
    assert curve(gradient_accumulation_steps=2, adjust_scheduler_to_accumulation=True) == [96, 92, 90]


def updates() -> None:
    assert curve(scheduler_ticks="updates") == [99, 98, 97, 96, 95]
    assert curve(scheduler_ticks="updates", gradient_accumulation_steps=2) == [99, 98, 97]


def not_with_the_optimizer() -> None:
    assert curve(step_scheduler_with_optimizer=False, gradient_accumulation_steps=2) == [98, 96, 95]


def ragged_tail() -> None:
    """The rank without a batch of its own counts with the other."""
    options = {"dataloader_config": DataLoaderConfiguration(even_batches=False)}
    assert curve(num_rows=18, **options) == [98, 96, 94, 92, 90]


class Triple:
    name = "triple"
    reason = "ticked three times an update"

    def ticks(self, window_length: int) -> int:
        return 3


def own_rule() -> None:
    assert curve(scheduler_ticks=Triple()) == [97, 94, 91, 88, 85]


def one_cycle_ends() -> None:
    """Written for 9 single-process updates: two a step overshoot in the end, where it must stay."""
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = OneCycleLR(optimizer, max_lr=1.0, total_steps=9)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    seen = []
    for _ in range(6):
        accelerator.backward(model(torch.ones(1, 1)).mean())
        optimizer.step()
        schedule.step()
        seen.append(schedule.last_epoch)
    assert seen == [2, 4, 6, 8, 8, 8]


def plateau_is_patient() -> None:
    """Patience counts evaluations, not processes."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, schedule = accelerator.prepare(
        model, optimizer, ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
    )
    rates = []
    for _ in range(4):
        schedule.step(1.0)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 1.0, 1.0, 0.5]


def per_epoch() -> None:
    """Stepped once an epoch, as each call is one tick without the optimizer's lead."""
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, StepLR(optimizer, 1, 0.5))
    for _ in range(3):
        accelerator.backward(model(torch.ones(1, 1)).mean())
        optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == [0.5]


def what_is_said() -> None:
    """Rank 0 says the rule and the end once, and nothing else: a length that fits no whole number of epochs is no mistake."""
    handler, logger = Lines(), logging.getLogger("headway")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        curve(length=30)
        curve(length=30)
        curve(length=15)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    is_main = Accelerator(cpu=True).is_main_process
    rule = "LinearLR is counted in the updates of the single-process loop: 2 ticks an update; it ends after 30 ticks, 15 updates"
    assert sum(rule in line for line in handler.lines) == is_main
    assert not [line for line in handler.lines if "would fit" in line]


SCENARIOS = [
    what_is_said, per_process, split_batches, micro_batches, updates, not_with_the_optimizer, ragged_tail, own_rule,
    one_cycle_ends, plateau_is_patient, per_epoch,
]  # fmt: skip


def play() -> dict[str, str]:
    """What went wrong in each scenario."""
    found = {}
    for scenario in SCENARIOS:
        try:
            scenario()
        except Exception:
            found[scenario.__name__] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def failures() -> list[dict[str, str]]:
    return run_ranks(play, 2)


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_on_two_processes(name: str, failures: list[dict[str, str]]) -> None:
    told = [f"rank {rank}: {found[name]}" for rank, found in enumerate(failures) if name in found]
    assert not told, "\n".join(told)
