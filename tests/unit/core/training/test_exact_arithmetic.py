"""On one process a prepared loop gives, bit by bit, what the loop written by hand gives."""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator

NUM_ROWS, BATCH, EPOCHS = 20 + 3 * 32, 32, 3  # the last batch of an epoch has 20 rows


@dataclass
class Parts:
    """A classifier and what trains it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: DataLoader[Any]

    def result(self, losses: list[float], norms: list[float]) -> dict[str, Any]:
        return {"losses": losses, "norms": norms, "state": copy.deepcopy(self.model.state_dict())}


def parts(kind: str, num_rows: int = NUM_ROWS, batch_size: int = BATCH) -> Parts:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 5))
    rules: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    }
    rows, labels = torch.randn(num_rows, 8), torch.randint(0, 5, (num_rows,))
    return Parts(model, rules[kind](model.parameters()), DataLoader(TensorDataset(rows, labels), batch_size=batch_size))


def by_hand(p: Parts, steps: int, precision: str) -> dict[str, Any]:
    losses, norms = [], []
    for _ in range(EPOCHS):
        for number, (inputs, labels) in enumerate(p.loader, start=1):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = cross_entropy(p.model(inputs), labels)
            losses.append(loss.item())
            ((loss / steps) if steps > 1 else loss).backward()
            if number % steps == 0:
                norms.append(nn.utils.clip_grad_norm_(p.model.parameters(), 0.5).item())
                p.optimizer.step()
                p.optimizer.zero_grad()
    return p.result(losses, norms)


def prepared(p: Parts, steps: int, precision: str, is_inside: bool) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=steps)
    model, optimizer, loader = accelerator.prepare(p.model, p.optimizer, p.loader)
    losses, norms = [], []
    for _ in range(EPOCHS):
        for number, (inputs, labels) in enumerate(loader, start=1):
            with accelerator.accumulate(model) if is_inside else contextlib.nullcontext():
                logits = model(inputs)
                with accelerator.autocast():
                    loss = cross_entropy(logits, labels)
                losses.append(loss.item())
                accelerator.backward(loss)
                assert accelerator.sync_gradients == (not is_inside or number % steps == 0)
                if number % steps == 0:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                    optimizer.step()
                    optimizer.zero_grad()
    return p.result(losses, norms)


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["losses"] == wanted["losses"]
    assert found["norms"] == wanted["norms"]
    for name, tensor in wanted["state"].items():
        assert torch.equal(found["state"][name], tensor), name


@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_run_with_a_ragged_tail(kind: str, precision: str, is_inside: bool) -> None:
    wanted = by_hand(parts(kind), 1, precision)
    assert_same(prepared(parts(kind), 1, precision, is_inside), wanted)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("steps", [2, 3, 5, 7])
def test_windows_of_equal_micro_batches(steps: int, precision: str) -> None:
    wanted = by_hand(parts("sgd", 14 * steps, 7), steps, precision)
    assert_same(prepared(parts("sgd", 14 * steps, 7), steps, precision, is_inside=True), wanted)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("steps", [2, 3, 4])
def test_windows_closed_by_hand(steps: int, precision: str, caplog: pytest.LogCaptureFixture) -> None:
    """The loop of many scripts: Accelerator(k), backward outside accumulate, and a step every k-th time."""
    wanted = by_hand(parts("adamw"), steps, precision)
    assert_same(prepared(parts("adamw"), steps, precision, is_inside=False), wanted)
    said = [record.getMessage() for record in caplog.records if "outside accumulate()" in record.getMessage()]
    assert len(said) == 1
    assert f"each loss is divided by {steps}" in said[0]


def test_nothing_is_said_without_accumulation(caplog: pytest.LogCaptureFixture) -> None:
    prepared(parts("sgd"), 1, "no", is_inside=False)
    assert not caplog.records


@pytest.mark.parametrize("weights", [(5, 11), (3, 3)])
def test_a_weight_that_one_process_knows_is_the_nominal_one(weights: tuple[int, ...]) -> None:
    """Token counts differ from batch to batch: a window of one micro-batch has nothing to correct."""
    rows = torch.randn(sum(weights), 8)
    plain = parts("sgd").model
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(copy.deepcopy(plain))
    for piece in rows.split(list(weights)):
        for each in (plain, model):
            each.zero_grad()
        plain(piece).square().mean().backward()
        with accelerator.accumulate(model):
            accelerator.backward(model(piece).square().mean(), weight=len(piece))
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)


def test_a_schedule_ticks_whenever_it_is_called_in_windows_closed_by_hand() -> None:
    """As in Accelerate: outside accumulate each call is for a window, and only a skipped update is not."""
    p = parts("sgd")
    schedule = torch.optim.lr_scheduler.LambdaLR(p.optimizer, lambda step: 1 / (1 + step))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader, schedule = accelerator.prepare(p.model, p.optimizer, p.loader, schedule)
    for number, (inputs, labels) in enumerate(loader, start=1):
        accelerator.backward(cross_entropy(model(inputs), labels))
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        assert schedule.get_last_lr() == [pytest.approx(0.1 / (1 + number))]
    assert accelerator.num_updates == 2
