"""Test the prepared optimizer: a torch optimizer that acts at the end of windows."""

import contextlib
import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway import Accelerator
from headway.core.training.prepared.optimizer import PreparedOptimizer
from headway.errors import PrepareError, StateError


def build(**options: object) -> tuple[Accelerator, nn.Module, PreparedOptimizer]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, **options)
    model = nn.Linear(2, 1)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def test_prepared_optimizer_is_an_optimizer_and_shares_its_state() -> None:
    accelerator, model, optimizer = build()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.defaults["momentum"] == 0.9
    accelerator.backward(model(torch.ones(1, 2)).mean())
    optimizer.step()
    assert optimizer.state is optimizer.optimizer.state
    assert len(optimizer.state) == 2
    assert optimizer.state_dict()["state"].keys() == {0, 1}
    other = build()[2]
    other.load_state_dict(optimizer.state_dict())
    assert len(other.state) == 2


def test_step_and_zero_grad_act_at_the_end_of_a_window() -> None:
    accelerator, model, optimizer = build(gradient_accumulation_steps=3)
    before = model.weight.detach().clone()
    for number in range(1, 7):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).mean(), weight=1)
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(model.weight, before) == (number < 3)
        assert (model.weight.grad is None) == (number % 3 == 0)
        assert accelerator.num_updates == optimizer.num_updates == number // 3


def test_zero_grad_can_keep_the_tensors() -> None:
    accelerator, model, optimizer = build()
    accelerator.backward(model(torch.ones(1, 2)).mean())
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(model.weight.grad, torch.zeros(1, 2))


def test_two_optimizers_of_a_window_make_one_update() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    model, first, second = accelerator.prepare(model, first, second)
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).mean(), weight=1)
            first.step()
            second.step()
    assert (accelerator.num_updates, first.num_updates, second.num_updates) == (2, 2, 2)


def test_closure_is_run() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.LBFGS(model.parameters(), max_iter=3))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.ones(4, 2)) - 1).square().mean()
        accelerator.backward(loss)
        return loss

    before = closure().item()
    optimizer.step(closure)
    assert closure().item() < before
    assert accelerator.num_updates == 1


def test_copies_are_of_the_wrapped_optimizer() -> None:
    _, _, optimizer = build()
    assert type(copy.deepcopy(optimizer)) is torch.optim.SGD
    assert type(pickle.loads(pickle.dumps(optimizer))) is torch.optim.SGD
    assert repr(optimizer).startswith("Prepared(SGD")


def test_parameter_groups_can_be_added() -> None:
    _, _, optimizer = build()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 1.0})
    assert [group["lr"] for group in optimizer.optimizer.param_groups] == [0.1, 1.0]


def test_preparing_twice_returns_the_same_object() -> None:
    accelerator, _, optimizer = build()
    assert accelerator.prepare_optimizer(optimizer) is optimizer
    assert accelerator.prepare_optimizer(optimizer.optimizer) is optimizer


def test_parameters_of_another_model_are_refused() -> None:
    model, stranger = nn.Linear(2, 1), nn.Linear(3, 1)
    with pytest.raises(PrepareError, match=r"SGD has 2 parameters that belong to no prepared model \(shapes \(1, 3\)"):
        Accelerator(cpu=True).prepare(model, torch.optim.SGD(stranger.parameters(), lr=0.1))


@pytest.mark.parametrize("is_inside", [True, False])
def test_backward_without_headway_is_an_error_at_the_first_step(is_inside: bool) -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.weight.detach().clone()
    with accelerator.accumulate(model) if is_inside else contextlib.nullcontext():
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(StateError, match=r"Instead of loss.backward\(\), write accelerator.backward\(loss\)"):
            optimizer.step()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("mistake", ["foreign", "cleared", "divided", "not named"])
def test_first_window_of_a_resumed_run_is_checked_too(
    mistake: str, is_resumed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def start() -> Any:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        models = nn.Linear(2, 1), nn.Linear(2, 1)
        return accelerator, *accelerator.prepare(*models, *(torch.optim.SGD(m.parameters(), lr=0.1) for m in models))

    def train(accelerator: Accelerator, model: nn.Module, optimizer: Any, mistake: str = "") -> None:
        for _ in range(2):
            with accelerator.accumulate(model):
                loss = model(torch.ones(1, 2)).mean()
                accelerator.backward(loss / 2 if mistake == "divided" else loss)
                if mistake == "cleared":
                    model.zero_grad()
                optimizer.step()
                optimizer.zero_grad()

    if is_resumed:
        accelerator, one, two, first, second = start()
        for _ in range(3):
            train(accelerator, one, first)
            train(accelerator, two, second)
        accelerator.save_state(tmp_path / "saved")
    accelerator, one, two, first, second = start()
    if is_resumed:
        accelerator.load_state(tmp_path / "saved")
    if mistake == "foreign":
        one(torch.ones(1, 2)).mean().backward()
        with pytest.raises(StateError, match=r"accelerator.backward\(\) did not compute"):
            first.step()
    elif mistake == "cleared":
        with pytest.raises(StateError, match="were cleared between two of its micro-batches"):
            train(accelerator, one, first, mistake)
    elif mistake == "divided":
        train(accelerator, one, first, mistake)
        assert "the loss was divided by 2" in caplog.text
    else:
        train(accelerator, one, first)
        with pytest.raises(StateError, match=r"no accumulate\(\) block has named Linear"):
            second.step()


def test_models_may_alternate_after_an_earlier_state_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The windows of the loaded run have the numbers of windows that were trained before."""
    accelerator = Accelerator(cpu=True)
    models = nn.Linear(2, 1), nn.Linear(2, 1)
    one, two, first, second = accelerator.prepare(
        *models, *(torch.optim.SGD(model.parameters(), lr=0.1) for model in models)
    )

    def train() -> None:
        for model in (one, two):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 2)).mean())
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()

    train()
    accelerator.save_state(tmp_path / "saved")
    train()
    accelerator.load_state(tmp_path / "saved")
    train()
    assert first.num_updates == second.num_updates == 2
    assert not caplog.text


def test_loss_that_the_loop_skips_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for number in range(3):
        with accelerator.accumulate(model):
            loss = model(torch.ones(1, 2)).sum()
            if number != 1:
                accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert accelerator.num_updates == 2
    assert "Move accelerator.backward(loss) above this line" in caplog.text


def test_closure_inside_accumulate_is_refused_and_around_it_works() -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.LBFGS(model.parameters(), max_iter=3))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.ones(4, 2)) - 1).square().mean()
        accelerator.backward(loss)
        return loss

    with pytest.raises(StateError, match=r"Open the block in the closure"), accelerator.accumulate(model):
        optimizer.step(closure)

    def open_block_and_call_closure() -> torch.Tensor:
        with accelerator.accumulate(model):
            return closure()

    before = open_block_and_call_closure().item()
    optimizer.step(open_block_and_call_closure)
    assert open_block_and_call_closure().item() < before
