"""Test that a prepared loop on one process gives bit for bit the results of a plain loop."""

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
class Training:
    """Classifier with its optimizer and loader."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: DataLoader[Any]

    def result(self, losses: list[float], norms: list[float]) -> dict[str, Any]:
        return {"losses": losses, "norms": norms, "state": copy.deepcopy(self.model.state_dict())}


def build_training(kind: str, num_rows: int = NUM_ROWS, batch_size: int = BATCH) -> Training:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 5))
    rules: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    }
    rows, labels = torch.randn(num_rows, 8), torch.randint(0, 5, (num_rows,))
    return Training(
        model, rules[kind](model.parameters()), DataLoader(TensorDataset(rows, labels), batch_size=batch_size)
    )


def train_plain(p: Training, steps: int, precision: str) -> dict[str, Any]:
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


def train_prepared(p: Training, steps: int, precision: str, is_inside: bool) -> dict[str, Any]:
    """Train with Headway. With `is_inside`, each backward is in an `accumulate` block."""
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


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == expected["losses"]
    assert found["norms"] == expected["norms"]
    for name, tensor in expected["state"].items():
        assert torch.equal(found["state"][name], tensor), name


@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_epochs_with_a_ragged_tail_match_plain_pytorch_bit_for_bit(kind: str, precision: str, is_inside: bool) -> None:
    expected = train_plain(build_training(kind), 1, precision)
    assert_same(train_prepared(build_training(kind), 1, precision, is_inside), expected)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("steps", [2, 3, 5, 7])
def test_windows_of_equal_micro_batches(steps: int, precision: str) -> None:
    expected = train_plain(build_training("sgd", 14 * steps, 7), steps, precision)
    assert_same(train_prepared(build_training("sgd", 14 * steps, 7), steps, precision, is_inside=True), expected)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("steps", [2, 3, 4])
def test_windows_closed_by_the_script_match_plain_pytorch_and_cause_a_warning(
    steps: int, precision: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Test the loop of many scripts: Accelerator(k), backward outside accumulate, and a step at every k-th batch."""
    expected = train_plain(build_training("adamw"), steps, precision)
    assert_same(train_prepared(build_training("adamw"), steps, precision, is_inside=False), expected)
    messages = [record.getMessage() for record in caplog.records if "outside accumulate()" in record.getMessage()]
    assert len(messages) == 1
    assert f"each loss is divided by {steps}" in messages[0]


def test_without_accumulation_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    train_prepared(build_training("sgd"), 1, "no", is_inside=False)
    assert not caplog.records


@pytest.mark.parametrize("weights", [(5, 11), (3, 3)])
def test_explicit_weight_on_one_process_needs_no_correction(weights: tuple[int, ...]) -> None:
    """Token counts differ between batches, but a window of one micro-batch needs no correction."""
    rows = torch.randn(sum(weights), 8)
    plain = build_training("sgd").model
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


def test_schedule_ticks_at_each_call_outside_accumulate() -> None:
    """As in Accelerate, each call outside accumulate counts for a window, unless the update was skipped."""
    p = build_training("sgd")
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
