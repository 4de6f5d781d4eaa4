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
from headway.core.training.prepared import own_steps
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
    loss = optimizer.step(closure)
    assert loss.item() == before  # as torch's LBFGS, which returns the loss of its first evaluation
    assert closure().item() < before
    assert accelerator.num_updates == 1


def test_step_returns_what_torch_returns() -> None:
    x, y = torch.randn(8, 2), torch.randn(8, 1)

    def train(optimizer: torch.optim.Optimizer, model: nn.Module, backward: Any) -> list[Any]:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            backward(loss)
            return loss

        results: list[Any] = [optimizer.step(closure) for _ in range(3)]
        return [float(each.detach()) for each in results] + [optimizer.step()]  # type: ignore[func-returns-value]

    for make in (torch.optim.SGD, torch.optim.AdamW):
        plain = nn.Linear(2, 1)
        model = copy.deepcopy(plain)
        expected = train(make(plain.parameters(), lr=0.1), plain, torch.Tensor.backward)
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, make(model.parameters(), lr=0.1))
        assert train(optimizer, model, accelerator.backward) == expected
        assert expected[-1] is None


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


class SAM(torch.optim.Optimizer):
    """The published SAM of davda54, as its users call it: two gradients, and two steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, "lr": 0.1})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1)
        self.num_swaps = 0

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * group["rho"] / norm)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first_step(zero_grad=True)
        torch.enable_grad()(closure)()
        self.second_step()

    def get_step_count(self) -> int:
        return 3

    def update_lr(self) -> None:
        self.param_groups[0]["lr"] *= 0.5

    @torch.no_grad()
    def write_step(self) -> None:
        """Change parameters through `data`, which torch's version counters do not show."""
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad, alpha=-0.1)

    def replace_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data = p.data + 1

    @torch.no_grad()
    def swap_weights(self) -> None:
        self.param_groups[0]["params"][0].mul_(1.0)


def train_with_sam(form: str) -> tuple[torch.Tensor, int]:
    """Make three updates, by SAM's own methods or by step(closure). Return the weight and the number of updates."""
    torch.manual_seed(0)
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, SAM(model.parameters()))
    inputs = torch.tensor([[1.0, 2.0], [3.0, -1.0]])

    def compute_gradient() -> None:
        accelerator.backward(model(inputs).square().mean())

    for _ in range(3):
        with accelerator.accumulate(model):
            compute_gradient()
            if form == "methods":
                optimizer.first_step(zero_grad=True)
                compute_gradient()
                optimizer.second_step(zero_grad=True)
            else:
                optimizer.step(compute_gradient)
            optimizer.zero_grad()
    return model.weight.detach(), accelerator.num_updates


def test_step_methods_of_its_own_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = SAM(model.parameters())
    inputs = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
    for _ in range(3):
        for step in (optimizer.first_step, optimizer.second_step):
            model(inputs).square().mean().backward()
            step(zero_grad=True)
    weight, num_updates = train_with_sam("closure")
    torch.testing.assert_close(weight, model.weight.detach())
    assert num_updates == 3
    assert not caplog.records
    weight, num_updates = train_with_sam("methods")
    torch.testing.assert_close(weight, model.weight.detach())
    assert num_updates == 0
    (warning,) = [each.getMessage() for each in caplog.records]
    assert warning.startswith("SAM.first_step() at ")
    assert "test_optimizer.py" in warning
    assert "step(closure)" in warning


def test_harmless_methods_do_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, SAM(model.parameters()))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.train()
    optimizer.eval()
    optimizer.zero_grad()
    optimizer.swap_weights()
    handle = optimizer.register_step_post_hook(lambda *args: None)
    handle.remove()
    assert optimizer.get_step_count() == 3
    assert optimizer.get_step_count.__name__ == "get_step_count"
    assert optimizer.num_swaps == 0
    for _ in range(3):
        optimizer.update_lr()
    assert not caplog.records


@pytest.mark.parametrize("method", ["write_step", "replace_step"])
def test_step_methods_that_write_to_data_warn(method: str, caplog: pytest.LogCaptureFixture) -> None:
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, SAM(model.parameters()))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    for _ in range(2):
        getattr(optimizer, method)()
    (warning,) = [each.getMessage() for each in caplog.records]
    assert warning.startswith(f"SAM.{method}() at ")


@pytest.mark.parametrize("failing_call", [1, 2])
def test_checksums_for_which_memory_runs_out_are_not_compared(
    failing_call: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Quiet(torch.optim.SGD):
        def update_nothing(self) -> None:
            """Change no parameter."""

    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, Quiet(model.parameters(), lr=0.1))
    calls = []

    def compute(tensors: Any) -> list[int] | None:
        calls.append(len(tensors))
        return None if len(calls) == failing_call else [0] * len(tensors)

    monkeypatch.setattr(own_steps, "try_checksums", compute)
    optimizer.update_nothing()
    assert calls == [2] * failing_call  # without a first result, there is nothing to compare
    assert not caplog.records
