"""Test schedules on one process: they tick for updates that were made, by one of three rules or a custom rule."""

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator
from headway.core.config.run import GradientAccumulationPlugin
from headway.core.strategies.placeholders import SchedulerPlaceholder
from headway.core.training.checks.schedule_lengths import get_schedule_length
from headway.core.training.prepared.scheduler import (
    StepsPerMicroBatch,
    StepsPerProcess,
    StepsPerUpdate,
    choose_rule,
    count_remaining_steps,
)
from headway.errors import ConfigError, PrepareError


def build(length: int = 100, **options: Any) -> tuple[Accelerator, Any, Any, Any, Any]:
    """Return an Accelerator and a prepared model, optimizer, loader of 10 batches and schedule.

    The learning rate falls by 1 per tick, from `length` to 0.
    """
    accelerator = Accelerator(cpu=True, **options)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(length))
    schedule = LinearLR(optimizer, 1.0, 0.0, total_iters=length)
    loader = DataLoader(TensorDataset(torch.ones(10, 1)), batch_size=1)
    return accelerator, *accelerator.prepare(model, optimizer, loader, schedule)


def train_and_list_rates(
    accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, schedule: Any
) -> list[float]:
    """Return the learning rate after each micro-batch of one epoch."""
    rates = []
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).mean())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        rates.append(round(schedule.get_last_lr()[0], 6))
    return rates


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [99, 98, 97, 96, 95, 94, 93, 92, 91, 90]),
        ({"gradient_accumulation_steps": 4}, [100, 100, 100, 99, 99, 99, 99, 98, 98, 97]),
        ({"gradient_accumulation_steps": 4, "scheduler_ticks": "updates"}, [100, 100, 100, 99, 99, 99, 99, 98, 98, 97]),
        ({"gradient_accumulation_steps": 4, "adjust_scheduler_to_accumulation": True},
         [100, 100, 100, 96, 96, 96, 96, 92, 92, 90]),
        ({"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=4, adjust_scheduler=True)},
         [100, 100, 100, 96, 96, 96, 96, 92, 92, 90]),
        ({"gradient_accumulation_steps": 4, "step_scheduler_with_optimizer": False},
         [99, 98, 97, 96, 95, 94, 93, 92, 91, 90]),
    ],
)  # fmt: skip
def test_schedule_advances_by_the_chosen_rule(options: dict[str, Any], expected: list[float]) -> None:
    assert train_and_list_rates(*build(**options)) == expected


class DoubleRule:
    """Rule defined by the user."""

    name = "double"
    reason = "ticked twice an update"

    def ticks(self, window_length: int) -> int:
        return 2


def test_custom_rule_is_used(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        parts = build(scheduler_ticks=DoubleRule())
    assert train_and_list_rates(*parts)[-1] == 80
    assert "LinearLR is ticked twice an update; it ends after 100 ticks, 50 updates from now" in caplog.text


@pytest.mark.parametrize(
    ("rule", "one", "window_of_3"),
    [(StepsPerProcess(4), 4, 4), (StepsPerMicroBatch(4), 4, 12), (StepsPerUpdate(), 1, 1)],
)
def test_ticks_per_update(rule: Any, one: int, window_of_3: int) -> None:
    assert (rule.ticks(1), rule.ticks(3)) == (one, window_of_3)


@pytest.mark.parametrize(
    ("options", "saved", "expected"),
    [
        # 2 processes with windows of 3 ticked 6 times for a full window. The last window here is half as long.
        ({"adjust_scheduler_to_accumulation": True}, (2, 3), [100, 100, 100, 94, 94, 94, 94, 88, 88, 85]),
        ({"adjust_scheduler_to_accumulation": True}, (1, 4), [100, 100, 100, 96, 96, 96, 96, 92, 92, 90]),
        ({}, (2, 3), [100, 100, 100, 98, 98, 98, 98, 96, 96, 94]),
        ({"scheduler_ticks": "updates"}, (2, 3), [100, 100, 100, 99, 99, 99, 99, 98, 98, 97]),
    ],
)
def test_resumed_run_keeps_its_ticks(options: dict[str, Any], saved: tuple[int, int], expected: list[float]) -> None:
    parts = build(gradient_accumulation_steps=4, **options)
    parts[0]._preparation.keep_tick_base(*saved)
    assert parts[0]._preparation.tick_base == saved
    assert train_and_list_rates(*parts) == expected


def test_ticks_kept_twice_are_those_of_the_first_run() -> None:
    """A checkpoint of a resumed run contains the tick base of the first run."""
    accelerator, *parts = build(gradient_accumulation_steps=4, adjust_scheduler_to_accumulation=True)
    accelerator._preparation.keep_tick_base(3, 1)
    accelerator._preparation.keep_tick_base(2, 3)
    assert train_and_list_rates(accelerator, *parts)[3] == 94


def test_schedule_of_an_engine_counts_updates_after_a_resume_on_other_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator, _, optimizer, _, schedule = build()
    real = StepLR(optimizer.optimizer, 1)
    monkeypatch.setattr(accelerator.strategy, "replace_placeholder", lambda placeholder, update_ratio: real)
    defined = accelerator.prepare(SchedulerPlaceholder())
    for num_processes in (4, 2):
        accelerator._preparation.keep_tick_base(num_processes, 1)
        assert (schedule.rule.ticks(1), defined.rule.ticks(1)) == (num_processes, 1)


def test_settings_choose_the_rule() -> None:
    assert choose_rule(None, False, 3) == StepsPerProcess(3)
    assert choose_rule(None, True, 3) == StepsPerMicroBatch(3)
    assert choose_rule("updates", False, 3) == StepsPerUpdate()
    with pytest.raises(ConfigError, match="both set the rule"):
        choose_rule("updates", True, 3)
    with pytest.raises(ConfigError, match="scheduler_ticks='epochs'"):
        choose_rule("epochs", False, 3)


def test_rule_and_end_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        build(length=20)
    lines = [record.getMessage() for record in caplog.records if "LinearLR" in record.getMessage()]
    assert lines == ["LinearLR is counted in the updates of the single-process loop: 1 tick an update; "
                     "it ends after 20 ticks, 20 updates from now"]  # fmt: skip


def test_one_cycle_schedule_stops_at_its_end() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = OneCycleLR(optimizer, max_lr=1.0, total_steps=5)
    loader = DataLoader(TensorDataset(torch.ones(10, 1)), batch_size=1)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    rates = train_and_list_rates(accelerator, model, optimizer, loader, schedule)
    assert rates[4:] == [rates[4]] * 6
    assert schedule.last_epoch == 4
    assert count_remaining_steps(schedule.scheduler) == 0


def test_plateau_schedule_counts_calls_with_a_metric() -> None:
    """Its patience is a number of evaluations, so each call is one tick and none of the rules applies."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    rates = []
    for _ in range(4):
        schedule.step(1.0)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 1.0, 1.0, 0.5]


def test_schedule_stepped_per_epoch_causes_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    accelerator, model, optimizer, loader, schedule = build()
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
    with caplog.at_level(logging.WARNING):
        schedule.step()
    assert "LinearLR.step() was called once for 10 updates" in caplog.text
    assert "step_scheduler_with_optimizer=False" in caplog.text
    assert schedule.get_last_lr() == [99.0]


def test_schedule_moves_only_with_updates() -> None:
    accelerator, model, optimizer, _, schedule = build()
    schedule.step()
    assert schedule.get_last_lr() == [100.0]
    accelerator.backward(model(torch.ones(1, 1)).mean())
    optimizer.step()
    schedule.step()
    schedule.step()
    assert schedule.get_last_lr() == [99.0]


def test_schedule_follows_its_own_optimizer() -> None:
    accelerator = Accelerator(cpu=True)
    models = [nn.Linear(1, 1), nn.Linear(1, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=8.0) for model in models]
    schedules = [StepLR(optimizer, 1, 0.5) for optimizer in optimizers]
    one, two, first, second, slow, fast = accelerator.prepare(*models, *optimizers, *schedules)
    for step in range(2):
        for model, optimizer in ((one, first), (two, second)) if step else ((two, second),):
            accelerator.backward(model(torch.ones(1, 1)).mean())
            optimizer.step()
        slow.step()
        fast.step()
    assert (slow.get_last_lr(), fast.get_last_lr()) == ([4.0], [2.0])


def test_schedule_without_its_optimizer_is_refused() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    with pytest.raises(PrepareError, match="follows an optimizer that is not prepared"):
        Accelerator(cpu=True).prepare(StepLR(optimizer, 1))


def test_state_is_saved_and_loaded() -> None:
    accelerator, model, optimizer, loader, schedule = build()
    train_and_list_rates(accelerator, model, optimizer, loader, schedule)
    *_, other = build()
    other.load_state_dict(schedule.state_dict())
    assert other.get_last_lr() == schedule.get_last_lr()
    other.step()
    assert other.last_epoch == 10


def test_length_of_known_schedules_is_found() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    assert get_schedule_length(CosineAnnealingLR(optimizer, T_max=30)) == 30
    assert get_schedule_length(StepLR(optimizer, 5)) is None
    chain = SequentialLR(optimizer, [LinearLR(optimizer, total_iters=5), CosineAnnealingLR(optimizer, 25)], [5])
    assert get_schedule_length(chain) == 30
    transformers = pytest.importorskip("transformers")
    assert get_schedule_length(transformers.get_linear_schedule_with_warmup(optimizer, 3, 40)) == 40
