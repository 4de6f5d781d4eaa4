"""Tests that messages about one step are true in each precision, and that `prepare()` recognizes unusual objects."""

import logging
from typing import Any

import pytest
import torch

from headway import Accelerator
from headway.errors import PrepareError
from tests.distributed.ranks import run_ranks


def train_with_bad_loss(precision: str, value: float, scales: bool) -> tuple[bool, list[str]]:
    """Train with one loss that is not finite. Return whether the weights stay finite, and the warnings about the loss."""
    from headway import GradScalerKwargs

    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("headway").addHandler(handler)
    options: dict[str, Any] = {} if scales else {"kwargs_handlers": [GradScalerKwargs(enabled=False)]}
    accelerator = Accelerator(cpu=True, mixed_precision=precision, **options)
    net = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for factor in (1.0, value, 1.0):
        accelerator.backward(model(torch.ones(2, 2)).float().mean() * factor)
        optimizer.step()
        optimizer.zero_grad()
    logging.getLogger("headway").removeHandler(handler)
    return all(torch.isfinite(each).all() for each in net.parameters()), [
        each for each in lines if "the loss of" in each
    ]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("precision", "value", "scales"),
    [
        ("fp16", float("inf"), True),
        ("fp16", float("nan"), True),
        ("fp16", float("inf"), False),
        ("bf16", float("inf"), True),
        ("no", float("nan"), True),
    ],
)
def test_warning_about_a_loss_that_is_not_finite_is_true(world_size, precision, value, scales):
    ranks = run_ranks(train_with_bad_loss, world_size, precision, value, scales)
    messages = [line for _, lines in ranks for line in lines]
    assert len(messages) == 1
    stays_finite = all(is_finite for is_finite, _ in ranks)
    assert stays_finite == (precision == "fp16" and scales)
    assert ("weights stay as they were" in messages[0]) == stays_finite
    assert ("Training continues with it" in messages[0]) != stays_finite


@pytest.mark.parametrize("base", ["SGD", "AdamW"])
def test_optimizer_wrapper_is_not_mistaken_for_a_schedule(base):
    schedulefree = pytest.importorskip("schedulefree", reason="schedulefree is not installed")
    model = torch.nn.Linear(2, 1)
    wrapper = schedulefree.ScheduleFreeWrapper(getattr(torch.optim, base)(model.parameters(), lr=0.1))
    with pytest.raises(PrepareError, match="ScheduleFreeWrapper, which has an optimizer's methods"):
        Accelerator(cpu=True).prepare(model, wrapper)


def test_custom_schedule_is_recognized():
    class Own:
        def __init__(self, optimizer):
            self.optimizer = optimizer

        def step(self):
            self.optimizer.param_groups[0]["lr"] *= 0.5

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    accelerator = Accelerator(cpu=True)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, Own(optimizer))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
