"""Test notices without a guard: the first non-finite loss, and the updates that fp16 skips."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway import Accelerator, GradScalerKwargs
from headway.core.runtime import events
from headway.core.tracking.report.data import load
from headway.core.tracking.report.key_figures import list_key_figures
from headway.core.training.checks import notices


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List of the warnings that are logged."""
    lines: list[str] = []
    monkeypatch.setattr(notices.log, "warning", lambda text, *args, **more: lines.append(text % args))
    return lines


class Listener:
    """Listener that keeps all events."""

    def __init__(self) -> None:
        self.heard: list[events.RunEvent] = []

    def hear(self, happening: events.RunEvent) -> None:
        self.heard.append(happening)


@pytest.fixture
def heard() -> Iterator[list[events.RunEvent]]:
    """List of all events during the test."""
    listener = Listener()
    events.subscribe(listener.hear)
    yield listener.heard
    del listener


def build(**options: Any) -> tuple[Accelerator, nn.Module, Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, **options)
    model = nn.Linear(1, 1)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def train(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, *values: float, weight: float | None = None
) -> None:
    for value in values:
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.tensor([[value]])).mean(), weight=weight)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_first_non_finite_loss_causes_a_warning(bad: float, warnings: list[str], heard: list[events.RunEvent]) -> None:
    accelerator, model, optimizer = build(gradient_accumulation_steps=2)
    train(accelerator, model, optimizer, 1.0, 1.0, 1.0)
    assert not warnings
    train(accelerator, model, optimizer, bad, 1.0, 1.0)
    assert len(warnings) == 1
    found = (
        r"update 2: the loss of micro-batch 2 was (nan|-?inf) on rank 0, or a gradient of update 1 was not finite\. "
    )
    assert re.match(found + "Training continues", warnings[0])
    assert "on_non_finite='skip'" in warnings[0]
    assert [(each.name, each.details["update"], each.details["action"]) for each in heard] == [
        ("non_finite", 2, "none")
    ]
    assert accelerator.num_updates == 3  # all updates are made
    assert accelerator.non_finite is None


def test_infinite_loss_with_a_finite_gradient_causes_a_warning(warnings: list[str]) -> None:
    accelerator, model, _ = build()
    accelerator.backward(model(torch.ones(1, 1)).mean() + torch.tensor(math.inf))
    assert warnings[0].startswith("update 1: the loss of micro-batch 1 was inf on rank 0. Training continues")


def test_micro_batch_of_weight_0_may_be_nan(warnings: list[str]) -> None:
    accelerator, model, optimizer = build()
    train(accelerator, model, optimizer, math.nan, weight=0.0)
    assert not warnings


def test_each_accelerator_reports_its_own_losses(warnings: list[str]) -> None:
    for _ in range(2):
        train(*build(), math.nan)
    assert len(warnings) == 2


# -------------------------------------------------------------------- fp16


def test_skipped_updates_are_counted(warnings: list[str], heard: list[events.RunEvent]) -> None:
    accelerator, model, optimizer = build(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=4.0)])
    train(accelerator, model, optimizer, 1.0, 6e4, 6e4, 1.0)
    assert (accelerator.num_updates, accelerator.clock.num_skipped) == (2, 2)
    assert [each.details["num_skipped"] for each in heard if each.name == "skipped_update"] == [1, 2]
    assert "2 updates skipped" in [fact() for fact in events.get_progress_texts()]
    assert not warnings


@pytest.mark.parametrize("guarded", [None, "skip"])
def test_skipping_from_the_start_causes_one_warning(guarded: str | None, warnings: list[str]) -> None:
    accelerator, model, optimizer = build(mixed_precision="fp16", on_non_finite=guarded)
    optimizers = [optimizer, accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))]
    for number in range(25):
        steep = (model.weight * 0).sqrt().sum()  # type: ignore[operator]  # 0, with a gradient that is not finite
        accelerator.backward(model(torch.ones(1, 1)).mean() + steep)
        for each in optimizers:
            each.step()
        optimizer.zero_grad()
        assert len([line for line in warnings if line.startswith("fp16 has skipped all of the first 20 updates")]) == (
            number >= 19
        )
    assert accelerator.clock.num_skipped == 25


def test_run_with_an_update_causes_no_warning_about_skips(warnings: list[str]) -> None:
    accelerator, model, optimizer = build(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1.0)])
    train(accelerator, model, optimizer, 1.0)
    train(accelerator, model, optimizer, *[math.inf] * 25)
    assert not [line for line in warnings if line.startswith("fp16")]


def test_report_counts_skipped_updates(tmp_path: Path) -> None:
    options = {
        "mixed_precision": "fp16",
        "kwargs_handlers": [GradScalerKwargs(init_scale=4.0)],
        "project_dir": tmp_path,
    }
    accelerator, model, optimizer = build(**options)
    accelerator.init_trackers("run")
    train(accelerator, model, optimizer, 1.0, 6e4, 6e4, 1.0)
    accelerator.end_training()
    facts = {fact.name: fact for fact in list_key_figures(load([tmp_path / "run"])[0])}
    assert (facts["Incidents"].value, facts["Incidents"].note) == ("2", "2 skipped by fp16")
