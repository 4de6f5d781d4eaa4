"""Helpers for scenarios that share one pair of processes: captured warnings, small models and data, and the scenario runner."""

import gc
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, log
from headway.common import scope
from headway.core.runtime import process


@contextmanager
def capture_warnings() -> Iterator[list[str]]:
    """Collect Headway's warnings in the block. Warnings that are normally logged once can appear again."""
    scope.drop(log.OnceFilter)
    said: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("headway")
    logger.addHandler(listener)
    try:
        yield said
    finally:
        logger.removeHandler(listener)


def assert_warned_once(said: list[str], *parts: str) -> None:
    """Assert that rank 0 logged exactly one line with all of `parts`, and that other ranks logged none."""
    found = [line for line in said if all(part in line for part in parts)]
    assert len(found) == (1 if process.current().is_main_process else 0), said


def make_data(num_rows: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_rows, 3, generator=generator)
    return rows, rows.sum(1, keepdim=True)


def make_parts(num_rows: int = 24, batch_size: int = 3) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, DataLoader(TensorDataset(*make_data(num_rows)), batch_size=batch_size)


def flatten_weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def are_equal_on_ranks(accelerator: Accelerator, model: nn.Module) -> bool:
    both = accelerator.gather(flatten_weights(model)[None])
    return bool(torch.equal(both[0], both[1]))


def train_plain_windows(per_update: int) -> torch.Tensor:
    model, optimizer, _ = make_parts()
    x, y = make_data()
    for start in range(0, len(x), per_update):
        mse_loss(model(x[start : start + per_update]), y[start : start + per_update]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flatten_weights(model)


def run_scenarios(scenarios: Sequence[Callable[[], None]]) -> dict[str, str]:
    """Run each scenario, and return the tracebacks of those that failed, by name."""
    found = {}
    for scenario in scenarios:
        try:
            scenario()
        except (Exception, pytest.fail.Exception):
            found[scenario.__name__] = traceback.format_exc()
        gc.collect()  # releases the scenario's Accelerators
    return found
