"""Learning rate schedules on two processes follow the curve of the single-process loop, for every rule of counting ticks."""

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


class CapturedLog(logging.Handler):
    """Collects log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def trace_rates(num_rows: int = 20, length: int = 100, **options: Any) -> list[float]:
    """Return the learning rate after each update of one epoch. The rate starts at `length` and falls by 1 per tick."""
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
    """With 20 rows in batches of 2, a single process makes 10 updates, and two processes make 5 with two ticks each."""
    assert trace_rates() == [98, 96, 94, 92, 90]
    assert trace_rates(gradient_accumulation_steps=2) == [98, 96, 94]


def split_batches() -> None:
    """The batch size is the global one, so there are as many updates as on a single process."""
    assert trace_rates(split_batches=True) == [99, 98, 97, 96, 95, 94, 93, 92, 91, 90]
    assert trace_rates(split_batches=True, gradient_accumulation_steps=4) == [99, 98, 97]
    assert trace_rates(split_batches=True, gradient_accumulation_steps=4, adjust_scheduler_to_accumulation=True) == [
        96,
        92,
        90,
    ]


def micro_batches() -> None:
    """Ticks count the single process's 10 micro-batches. The short last window ticks by its real length."""
    assert trace_rates(adjust_scheduler_to_accumulation=True) == [98, 96, 94, 92, 90]
    assert trace_rates(gradient_accumulation_steps=2, adjust_scheduler_to_accumulation=True) == [96, 92, 90]


def updates() -> None:
    assert trace_rates(scheduler_ticks="updates") == [99, 98, 97, 96, 95]
    assert trace_rates(scheduler_ticks="updates", gradient_accumulation_steps=2) == [99, 98, 97]


def scheduler_independent_of_optimizer() -> None:
    assert trace_rates(step_scheduler_with_optimizer=False, gradient_accumulation_steps=2) == [98, 96, 95]


def ragged_tail() -> None:
    """The rank without data in the last batch makes as many ticks as the other rank."""
    options = {"dataloader_config": DataLoaderConfiguration(even_batches=False)}
    assert trace_rates(num_rows=18, **options) == [98, 96, 94, 92, 90]


class Triple:
    name = "triple"
    reason = "ticked three times an update"

    def ticks(self, window_length: int) -> int:
        return 3


def custom_rule() -> None:
    assert trace_rates(scheduler_ticks=Triple()) == [97, 94, 91, 88, 85]


def one_cycle_stays_at_its_end() -> None:
    """A schedule for 9 single-process updates reaches its end with two ticks per update, and must stay there."""
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


def plateau_counts_evaluations() -> None:
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
    """Stepped once per epoch with step_scheduler_with_optimizer=False, each call is one tick."""
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, StepLR(optimizer, 1, 0.5))
    for _ in range(3):
        accelerator.backward(model(torch.ones(1, 1)).mean())
        optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == [0.5]


def log_messages() -> None:
    """Rank 0 logs the rule and the end once. A length that is no whole number of epochs causes no warning."""
    handler, logger = CapturedLog(), logging.getLogger("headway")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        trace_rates(length=30)
        trace_rates(length=30)
        trace_rates(length=15)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    is_main = Accelerator(cpu=True).is_main_process
    rule = "LinearLR is counted in the updates of the single-process loop: 2 ticks an update; it ends after 30 ticks, 15 updates"
    assert sum(rule in line for line in handler.lines) == is_main
    assert not [line for line in handler.lines if "would fit" in line]


SCENARIOS = [
    log_messages, per_process, split_batches, micro_batches, updates, scheduler_independent_of_optimizer, ragged_tail, custom_rule,
    one_cycle_stays_at_its_end, plateau_counts_evaluations, per_epoch,
]  # fmt: skip


def run_scenarios() -> dict[str, str]:
    """Run each scenario, and return the tracebacks of those that failed, by name."""
    found = {}
    for scenario in SCENARIOS:
        try:
            scenario()
        except Exception:
            found[scenario.__name__] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def failures() -> list[dict[str, str]]:
    return run_ranks(run_scenarios, 2)


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_scenario_on_two_processes(name: str, failures: list[dict[str, str]]) -> None:
    reports = [f"rank {rank}: {found[name]}" for rank, found in enumerate(failures) if name in found]
    assert not reports, "\n".join(reports)
