"""Schedules of a run with `global_batch_size`: the same learning rates on any number of processes, also after a resume."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration
from tests.distributed.ranks import run_ranks

NUM_ROWS, NUM_EPOCHS, GLOBAL_BATCH, BATCH = 64, 2, 8, 2
NUM_UPDATES = NUM_EPOCHS * NUM_ROWS // GLOBAL_BATCH


def train(
    length: int, folder: str | None = None, until: int | None = None, counts_micro_batches: bool = False
) -> list[float]:
    """Train on every rank, and return the learning rate after each update. Save after update `until` and stop."""
    project = None if folder is None else ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(
        cpu=True,
        global_batch_size=GLOBAL_BATCH,
        project_config=project,
        adjust_scheduler_to_accumulation=counts_micro_batches,
    )
    torch.manual_seed(0)
    x = torch.randn(NUM_ROWS, 4)
    loader: Any = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=BATCH)
    model: Any = torch.nn.Linear(4, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=length)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if folder is not None:
        accelerator.resume("latest")
    rates = []
    for _ in accelerator.epochs(NUM_EPOCHS):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                rates.append(schedule.get_last_lr()[0])
                if accelerator.num_updates == until:
                    accelerator.save_state()
                    return rates
    return rates


def list_plain_rates(length: int, ticks: int) -> list[float]:
    """Return the learning rates of torch's schedule after each update, with `ticks` scheduler steps per update."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=length)
    rates = []
    for _ in range(NUM_UPDATES):
        for _ in range(ticks):
            optimizer.step()
            schedule.step()
        rates.append(schedule.get_last_lr()[0])
    return rates


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_schedule_counted_in_global_batches_ends_with_the_training(world_size):
    rates = run_ranks(train, world_size, NUM_UPDATES)
    assert rates == [list_plain_rates(NUM_UPDATES, 1)] * world_size


def test_schedule_counted_in_single_process_micro_batches_is_unchanged():
    plain = list_plain_rates(NUM_UPDATES * GLOBAL_BATCH // BATCH, GLOBAL_BATCH // BATCH)
    for world_size in (1, 2):
        found = run_ranks(train, world_size, NUM_UPDATES * GLOBAL_BATCH // BATCH, None, None, True)
        assert found[0] == plain


def test_schedule_continues_on_another_number_of_processes(tmp_path):
    plain = list_plain_rates(NUM_UPDATES, 1)
    assert run_ranks(train, 2, NUM_UPDATES, str(tmp_path), 5)[0] == plain[:5]
    assert run_ranks(train, 1, NUM_UPDATES, str(tmp_path), 9)[0] == plain[5:9]
    assert run_ranks(train, 4, NUM_UPDATES, str(tmp_path))[0] == plain[9:]
