"""Two processes that share one sharded model: hooks, writes and optimizers that its layout would lose without a word.

Each scenario is played under FSDP and under tensor parallelism, against the same loop written by hand on one process.
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
from tests.distributed.scenarios import assert_said, data, listening, play

LAYOUTS = ("fsdp", "tp")
ROWS = 8
NUM_UPDATES = 2


class Net(nn.Module):
    """Two layers, which tensor parallelism knows how to cut."""

    _tp_plan = {"wide": "colwise", "narrow": "rowwise"}  # noqa: RUF012  (transformers' name and form)

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.narrow(torch.tanh(self.wide(rows)))
        return out


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def ready(layout: str) -> tuple[Accelerator, nn.Module, Any]:
    """All prepared."""
    accelerator, model = Accelerator(cpu=True, strategy=layout), net()
    return accelerator, *accelerator.prepare(model, sgd(model))


def loss_of(accelerator: Accelerator, model: nn.Module, number: int) -> torch.Tensor:
    """The loss of this rank's rows of one update: under tensor parallelism all ranks see the same."""
    shard, start = accelerator.strategy.data_shard, number * ROWS
    rows = slice(start + shard.index, start + ROWS, shard.count)
    return mse_loss(model(data()[0][rows]), data()[1][rows])


def train(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, before_step: Callable[[], None] = lambda: None
) -> None:
    for number in range(NUM_UPDATES):
        accelerator.backward(loss_of(accelerator, model, number))
        before_step()
        optimizer.step()
        optimizer.zero_grad()


def by_hand(model: nn.Module, before_step: Callable[[], None] = lambda: None) -> torch.Tensor:
    """The weights after the same loop on one process, in plain PyTorch."""
    optimizer = sgd(model)
    for number in range(NUM_UPDATES):
        rows = slice(number * ROWS, (number + 1) * ROWS)
        mse_loss(model(data()[0][rows]), data()[1][rows]).backward()
        before_step()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def whole(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([each.flatten() for each in found])


def double(grad: torch.Tensor) -> torch.Tensor:
    return grad * 2


def fill(model: nn.Module) -> None:
    """By new tensors in the place of the values."""
    for parameter in model.parameters():
        parameter.data = torch.full(tuple(parameter.shape), 0.1)


# -------------------------------------------------------------------- optimizers


def an_optimizer_from_before_that_is_not_prepared(layout: str) -> None:
    """It holds the whole parameters, of which nothing is trained any more."""
    accelerator, model = Accelerator(cpu=True, strategy=layout), net()
    optimizer = sgd(model)
    model = accelerator.prepare(model)
    with pytest.raises(
        StateError, match=r"SGD is not prepared, and 4 of its 4 parameters were replaced.*prepare\(\) together"
    ):
        train(accelerator, model, optimizer)


def an_optimizer_from_afterwards_that_is_not_prepared(layout: str) -> None:
    """It trains the right parameters; what is missing is said once."""
    accelerator = Accelerator(cpu=True, strategy=layout)
    model = accelerator.prepare(net())
    with listening() as said:
        train(accelerator, model, sgd(model))
    assert_said(said, "SGD is not prepared, but its model is", "checkpoints lack its state")
    torch.testing.assert_close(whole(model), by_hand(net()))


# -------------------------------------------------------------------- hooks


def hooks_from_before(layout: str) -> None:
    for kind in ("register_hook", "register_post_accumulate_grad_hook"):
        accelerator, model = Accelerator(cpu=True, strategy=layout), net()
        getattr(model.wide.weight, kind)(lambda grad: None)  # type: ignore[union-attr]
        with pytest.raises(PrepareError, match=r"1 parameter \(wide.weight\) of Net have hooks.*after prepare\(\)"):
            accelerator.prepare(model, sgd(model))


def hooks_from_afterwards(layout: str) -> None:
    """Autograd runs them on the parts of tensor parallelism, and never on those of FSDP."""
    accelerator, model, optimizer = ready(layout)
    for parameter in model.parameters():
        parameter.register_hook(double)
    if layout == "fsdp":
        with pytest.raises(StateError, match=r"4 parameters \(wide.weight.*register_hook, which never run"):
            train(accelerator, model, optimizer)
        return
    train(accelerator, model, optimizer)
    plain = net()
    for parameter in plain.parameters():
        parameter.register_hook(double)
    torch.testing.assert_close(whole(model), by_hand(plain))


def hooks_after_the_reduction(layout: str) -> None:
    """What the messages recommend."""
    accelerator, model, optimizer = ready(layout)
    plain = net()
    for each in (model, plain):
        for parameter in each.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: [p.grad.mul_(2)].clear())
    train(accelerator, model, optimizer)
    torch.testing.assert_close(whole(model), by_hand(plain))


# -------------------------------------------------------------------- writes


def values_from_before(layout: str) -> None:
    accelerator, model, plain = Accelerator(cpu=True, strategy=layout), net(), net()
    optimizer = sgd(model)
    fill(model)
    fill(plain)
    model, optimizer = accelerator.prepare(model, optimizer)
    train(accelerator, model, optimizer)
    torch.testing.assert_close(whole(model), by_hand(plain))


def values_in_place(layout: str) -> None:
    accelerator, model, optimizer = ready(layout)
    plain = net()
    for each in (model, plain):
        for parameter in each.parameters():
            parameter.data.mul_(0.5)
            parameter.data.add_(0.1)
    train(accelerator, model, optimizer)
    torch.testing.assert_close(whole(model), by_hand(plain))


def values_assigned_afterwards(layout: str) -> None:
    accelerator, model, optimizer = ready(layout)
    fill(model)
    with pytest.raises(
        StateError, match=r"4 parameters \(wide.weight.*of Net, which is sharded.*parameter.data = tensor"
    ):
        train(accelerator, model, optimizer)


def values_assigned_after_an_update(layout: str) -> None:
    """A constraint on weights, say; it is said before the second update."""
    accelerator, model, optimizer = ready(layout)
    accelerator.backward(loss_of(accelerator, model, 0))
    optimizer.step()
    optimizer.zero_grad()
    weight = model.wide.weight
    weight.data = weight.data.clamp(-0.1, 0.1)  # type: ignore[union-attr, operator]
    accelerator.backward(loss_of(accelerator, model, 1))
    with pytest.raises(StateError, match=r"1 parameter \(wide.weight\).*parameter.data = tensor"):
        optimizer.step()


def tensors_from_before(layout: str) -> None:
    """A penalty on parameters listed before prepare() has a gradient that goes nowhere; so has a value written to them."""
    for use in ("loss", "write"):
        accelerator, model = Accelerator(cpu=True, strategy=layout), net()
        listed = list(model.parameters())
        model, optimizer = accelerator.prepare(model, sgd(model))
        penalty = listed[0].square().sum() if use == "loss" else 0.0
        if use == "write":
            with torch.no_grad():
                listed[0].zero_()
        accelerator.backward(loss_of(accelerator, model, 0) + penalty)
        with pytest.raises(StateError, match=r"1 parameter \(wide.weight\).*tensors from before prepare\(\)"):
            optimizer.step()


def values_written_after_an_evaluation(layout: str) -> None:
    """After an evaluation the module tree shows shards again, so what is written to them counts."""
    accelerator, model, optimizer = ready(layout)
    plain = net()
    with torch.no_grad():
        model(data()[0])
        for each in (model, plain):
            for parameter in each.parameters():
                parameter.mul_(0.5)
    train(accelerator, model, optimizer)
    torch.testing.assert_close(whole(model), by_hand(plain))


# -------------------------------------------------------------------- norms


def a_norm_summed_by_hand(layout: str) -> None:
    accelerator, model, optimizer = ready(layout)
    plain, norms, wanted = net(), list[float](), list[float]()

    def note(model: nn.Module, into: list[float]) -> None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        into += [
            sum(grad.pow(2).sum().item() for grad in grads) ** 0.5,
            sum(grad.data.norm(2).item() ** 2 for grad in grads) ** 0.5,
            sum(float(grad.abs().sum()) for grad in grads),
        ]

    train(accelerator, model, optimizer, lambda: note(model, norms))
    by_hand(plain, lambda: note(plain, wanted))
    assert norms == pytest.approx(wanted, rel=1e-5)


def a_norm_of_one_rank(layout: str) -> None:
    """The others never come to the sum."""
    accelerator, model, _ = ready(layout)
    accelerator.backward(loss_of(accelerator, model, 0))
    if accelerator.is_main_process:
        with pytest.raises(UnsupportedError, match="on rank 0 only"):
            model.wide.weight.grad.pow(2).sum().item()  # type: ignore[union-attr]


SCENARIOS: list[Callable[[str], None]] = [
    an_optimizer_from_before_that_is_not_prepared,
    an_optimizer_from_afterwards_that_is_not_prepared,
    hooks_from_before,
    hooks_from_afterwards,
    hooks_after_the_reduction,
    values_from_before,
    values_in_place,
    values_assigned_afterwards,
    values_assigned_after_an_update,
    tensors_from_before,
    values_written_after_an_evaluation,
    a_norm_summed_by_hand,
    a_norm_of_one_rank,
]


def play_in(layout: str) -> dict[str, str]:
    """What went wrong in each scenario under the layout."""
    found = {}
    for scenario in SCENARIOS:
        played = partial(scenario, layout)
        played.__name__ = scenario.__name__  # type: ignore[attr-defined]
        found.update(play([played]))
    return found


@pytest.fixture(scope="module")
def failures() -> dict[str, list[dict[str, str]]]:
    return {layout: run_ranks(play_in, 2, layout) for layout in LAYOUTS}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_on_two_processes(name: str, layout: str, failures: dict[str, list[dict[str, str]]]) -> None:
    told = [f"rank {rank}: {found[name]}" for rank, found in enumerate(failures[layout]) if name in found]
    assert not told, "\n".join(told)
