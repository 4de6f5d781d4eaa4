"""Hooks, writes and optimizers on a sharded model of two processes that its layout would otherwise ignore silently.

Each scenario runs under FSDP and under tensor parallelism, compared with the same loop in plain PyTorch on one process.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from headway import Accelerator
from headway.errors import PrepareError, StateError, UnsupportedError
from tests.distributed.ranks import run_ranks
from tests.distributed.scenarios import assert_warned_once, capture_warnings, make_data, run_scenarios

LAYOUTS = ("fsdp", "tp")
ROWS = 8
NUM_UPDATES = 2


class Net(nn.Module):
    """Two layers that tensor parallelism can split."""

    _tp_plan = {"wide": "colwise", "narrow": "rowwise"}  # noqa: RUF012 - transformers' name and form

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.narrow(torch.tanh(self.wide(rows)))
        return out


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def prepare_training(layout: str) -> tuple[Accelerator, nn.Module, Any]:
    """Return the Accelerator, the prepared model and the prepared optimizer."""
    accelerator, model = Accelerator(cpu=True, strategy=layout), make_net()
    return accelerator, *accelerator.prepare(model, make_sgd(model))


def compute_loss(accelerator: Accelerator, model: nn.Module, number: int) -> torch.Tensor:
    """Return the loss of this rank's rows of one update. Under tensor parallelism, all ranks have the same rows."""
    shard, start = accelerator.strategy.data_shard, number * ROWS
    rows = slice(start + shard.index, start + ROWS, shard.count)
    return mse_loss(model(make_data()[0][rows]), make_data()[1][rows])


def train(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, before_step: Callable[[], None] = lambda: None
) -> None:
    for number in range(NUM_UPDATES):
        accelerator.backward(compute_loss(accelerator, model, number))
        before_step()
        optimizer.step()
        optimizer.zero_grad()


def train_by_hand(model: nn.Module, before_step: Callable[[], None] = lambda: None) -> torch.Tensor:
    """Train the same loop on one process in plain PyTorch, and return the weights."""
    optimizer = make_sgd(model)
    for number in range(NUM_UPDATES):
        rows = slice(number * ROWS, (number + 1) * ROWS)
        mse_loss(model(make_data()[0][rows]), make_data()[1][rows]).backward()
        before_step()
        optimizer.step()
        optimizer.zero_grad()
    return gather_weights(model)


def gather_weights(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([each.flatten() for each in found])


def double(grad: torch.Tensor) -> torch.Tensor:
    return grad * 2


def assign_values(model: nn.Module) -> None:
    """Assign new tensors as the parameters' values."""
    for parameter in model.parameters():
        parameter.data = torch.full(tuple(parameter.shape), 0.1)


# -------------------------------------------------------------------- optimizers


def unprepared_optimizer_made_before(layout: str) -> None:
    """The optimizer holds the former whole parameters, which are no longer trained."""
    accelerator, model = Accelerator(cpu=True, strategy=layout), make_net()
    optimizer = make_sgd(model)
    model = accelerator.prepare(model)
    with pytest.raises(
        StateError, match=r"SGD is not prepared, and 4 of its 4 parameters were replaced.*prepare\(\) together"
    ):
        train(accelerator, model, optimizer)


def unprepared_optimizer_made_afterwards(layout: str) -> None:
    """The optimizer trains the right parameters. A warning says once what is missing."""
    accelerator = Accelerator(cpu=True, strategy=layout)
    model = accelerator.prepare(make_net())
    with capture_warnings() as warnings:
        train(accelerator, model, make_sgd(model))
    assert_warned_once(warnings, "SGD is not prepared, but its model is", "checkpoints lack its state")
    torch.testing.assert_close(gather_weights(model), train_by_hand(make_net()))


# -------------------------------------------------------------------- hooks


def hooks_registered_before(layout: str) -> None:
    for kind in ("register_hook", "register_post_accumulate_grad_hook"):
        accelerator, model = Accelerator(cpu=True, strategy=layout), make_net()
        getattr(model.wide.weight, kind)(lambda grad: None)  # type: ignore[union-attr]
        with pytest.raises(PrepareError, match=r"1 parameter \(wide.weight\) of Net have hooks.*after prepare\(\)"):
            accelerator.prepare(model, make_sgd(model))


def hooks_registered_afterwards(layout: str) -> None:
    """Autograd runs the hooks on shards of tensor parallelism, and never on those of FSDP."""
    accelerator, model, optimizer = prepare_training(layout)
    for parameter in model.parameters():
        parameter.register_hook(double)
    if layout == "fsdp":
        with pytest.raises(StateError, match=r"4 parameters \(wide.weight.*register_hook, which never run"):
            train(accelerator, model, optimizer)
        return
    train(accelerator, model, optimizer)
    plain = make_net()
    for parameter in plain.parameters():
        parameter.register_hook(double)
    torch.testing.assert_close(gather_weights(model), train_by_hand(plain))


def post_accumulate_hooks(layout: str) -> None:
    """The error messages recommend hooks of this kind."""
    accelerator, model, optimizer = prepare_training(layout)
    plain = make_net()
    for each in (model, plain):
        for parameter in each.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: [p.grad.mul_(2)].clear())
    train(accelerator, model, optimizer)
    torch.testing.assert_close(gather_weights(model), train_by_hand(plain))


# -------------------------------------------------------------------- writes


def values_assigned_before(layout: str) -> None:
    accelerator, model, plain = Accelerator(cpu=True, strategy=layout), make_net(), make_net()
    optimizer = make_sgd(model)
    assign_values(model)
    assign_values(plain)
    model, optimizer = accelerator.prepare(model, optimizer)
    train(accelerator, model, optimizer)
    torch.testing.assert_close(gather_weights(model), train_by_hand(plain))


def values_changed_in_place(layout: str) -> None:
    accelerator, model, optimizer = prepare_training(layout)
    plain = make_net()
    for each in (model, plain):
        for parameter in each.parameters():
            parameter.data.mul_(0.5)
            parameter.data.add_(0.1)
    train(accelerator, model, optimizer)
    torch.testing.assert_close(gather_weights(model), train_by_hand(plain))


def values_assigned_afterwards(layout: str) -> None:
    accelerator, model, optimizer = prepare_training(layout)
    assign_values(model)
    with pytest.raises(
        StateError, match=r"4 parameters \(wide.weight.*of Net, which is sharded.*parameter.data = tensor"
    ):
        train(accelerator, model, optimizer)


def values_assigned_after_an_update(layout: str) -> None:
    """A script may clip weights in this way. The error comes before the second update."""
    accelerator, model, optimizer = prepare_training(layout)
    accelerator.backward(compute_loss(accelerator, model, 0))
    optimizer.step()
    optimizer.zero_grad()
    weight = model.wide.weight
    weight.data = weight.data.clamp(-0.1, 0.1)  # type: ignore[union-attr, operator]
    with pytest.raises(StateError, match=r"1 parameter \(wide.weight\).*parameter.data = tensor"):
        accelerator.backward(compute_loss(accelerator, model, 1))


def values_assigned_by_an_optimizer_with_steps_of_its_own(layout: str) -> None:
    """Implementations of SAM call first_step() and second_step(), and the prepared optimizer's step() never runs."""
    accelerator, model, optimizer = prepare_training(layout)
    with pytest.raises(
        StateError, match=r"4 parameters \(wide.weight.*of Net, which is sharded.*parameter.data = tensor"
    ):
        train_with_second_steps(accelerator, model, optimizer.optimizer)


def train_with_second_steps(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make four updates, each of which then assigns the parameters' values, as SAM's second_step() does."""
    for index in range(4):
        accelerator.backward(compute_loss(accelerator, model, index))
        optimizer.step()
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()


def values_assigned_after_a_second_prepare(layout: str) -> None:
    """A released model is sharded already, and `prepare` only registers it again."""
    accelerator, model, optimizer = prepare_training(layout)
    train(accelerator, model, optimizer)
    accelerator.free_memory()
    model, optimizer = accelerator.prepare(model, make_sgd(model))
    train(accelerator, model, optimizer)
    accelerator.free_memory()
    with torch.no_grad():
        model(make_data()[0])  # a forward of a released model leaves the root's parameters gathered
    model, optimizer = accelerator.prepare(model, make_sgd(model))
    assign_values(model)
    with pytest.raises(StateError, match=r"4 parameters \(wide.weight.*of \w*Net.*parameter.data = tensor"):
        train(accelerator, model, optimizer)


def former_tensors_in_losses_and_writes(layout: str) -> None:
    """Gradients of a penalty on parameters listed before `prepare`, and values written to them, would be lost."""
    for use in ("loss", "write"):
        accelerator, model = Accelerator(cpu=True, strategy=layout), make_net()
        listed = list(model.parameters())
        model, optimizer = accelerator.prepare(model, make_sgd(model))
        penalty = listed[0].square().sum() if use == "loss" else 0.0
        if use == "write":
            with torch.no_grad():
                listed[0].zero_()
        accelerator.backward(compute_loss(accelerator, model, 0) + penalty)
        with pytest.raises(StateError, match=r"1 parameter \(wide.weight\).*tensors from before prepare\(\)"):
            optimizer.step()


def values_written_after_an_evaluation(layout: str) -> None:
    """After an evaluation, modules have sharded parameters again, so values written to them count."""
    accelerator, model, optimizer = prepare_training(layout)
    plain = make_net()
    with torch.no_grad():
        model(make_data()[0])
        for each in (model, plain):
            for parameter in each.parameters():
                parameter.mul_(0.5)
    train(accelerator, model, optimizer)
    torch.testing.assert_close(gather_weights(model), train_by_hand(plain))


# -------------------------------------------------------------------- norms


def norm_summed_by_hand(layout: str) -> None:
    accelerator, model, optimizer = prepare_training(layout)
    plain, norms, expected = make_net(), list[float](), list[float]()

    def append_norms(model: nn.Module, into: list[float]) -> None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        into += [
            sum(grad.pow(2).sum().item() for grad in grads) ** 0.5,
            sum(grad.data.norm(2).item() ** 2 for grad in grads) ** 0.5,
            sum(float(grad.abs().sum()) for grad in grads),
        ]

    train(accelerator, model, optimizer, lambda: append_norms(model, norms))
    train_by_hand(plain, lambda: append_norms(plain, expected))
    assert norms == pytest.approx(expected, rel=1e-5)


def norm_on_one_rank(layout: str) -> None:
    """The other ranks never reach the collective sum."""
    accelerator, model, _ = prepare_training(layout)
    accelerator.backward(compute_loss(accelerator, model, 0))
    if accelerator.is_main_process:
        with pytest.raises(UnsupportedError, match="on rank 0 only"):
            model.wide.weight.grad.pow(2).sum().item()  # type: ignore[union-attr]


SCENARIOS: list[Callable[[str], None]] = [
    unprepared_optimizer_made_before,
    unprepared_optimizer_made_afterwards,
    hooks_registered_before,
    hooks_registered_afterwards,
    post_accumulate_hooks,
    values_assigned_before,
    values_changed_in_place,
    values_assigned_afterwards,
    values_assigned_after_an_update,
    values_assigned_by_an_optimizer_with_steps_of_its_own,
    values_assigned_after_a_second_prepare,
    former_tensors_in_losses_and_writes,
    values_written_after_an_evaluation,
    norm_summed_by_hand,
    norm_on_one_rank,
]


def run_in_layout(layout: str) -> dict[str, str]:
    """Run each scenario in the layout, and return the tracebacks of those that failed, by name."""
    found = {}
    for scenario in SCENARIOS:
        bound = partial(scenario, layout)
        bound.__name__ = scenario.__name__  # type: ignore[attr-defined]
        found.update(run_scenarios([bound]))
    return found


@pytest.fixture(scope="module")
def failures() -> dict[str, list[dict[str, str]]]:
    return {layout: run_ranks(run_in_layout, 2, layout) for layout in LAYOUTS}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_scenario_on_two_processes(name: str, layout: str, failures: dict[str, list[dict[str, str]]]) -> None:
    reports = [f"rank {rank}: {found[name]}" for rank, found in enumerate(failures[layout]) if name in found]
    assert not reports, "\n".join(reports)
