"""Gradients are reduced under DDP however a loss was computed: by the model's call, its forward, a part of it, or twice."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator
from tests.distributed.ranks import run_ranks
from tests.distributed.scenarios import are_equal_on_ranks, play, weights

ROWS, WINDOW = 32, 8
_Backward = Callable[[torch.Tensor], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


def called(model: Any, x: torch.Tensor, y: torch.Tensor, backward: _Backward) -> None:
    backward(mse_loss(model(x), y))


def by_forward(model: Any, x: torch.Tensor, y: torch.Tensor, backward: _Backward) -> None:
    backward(mse_loss(model.forward(x), y))


def by_parts(model: Any, x: torch.Tensor, y: torch.Tensor, backward: _Backward) -> None:
    backward(mse_loss(model.head(model.encoder(x)), y))


def by_one_part(model: Any, x: torch.Tensor, y: torch.Tensor, backward: _Backward) -> None:
    """The head learns nothing."""
    backward(mse_loss(model.encoder(x).sum(1, keepdim=True), y))


def call_and_part(model: Any, x: torch.Tensor, y: torch.Tensor, backward: _Backward) -> None:
    backward(mse_loss(model(x), y) + model.encoder(x).square().mean())


def penalty_afterwards(model: Any, x: torch.Tensor, y: torch.Tensor, backward: _Backward) -> None:
    """A second loss over some of the parameters, and over no forward at all."""
    backward(mse_loss(model(x), y))
    backward(0.01 * sum(p.abs().sum() for p in model.parameters() if p.ndim > 1))


def penalty_first(model: Any, x: torch.Tensor, y: torch.Tensor, backward: _Backward) -> None:
    backward(0.01 * sum(p.abs().sum() for p in model.parameters() if p.ndim > 1))
    backward(mse_loss(model(x), y))


def two_parts_apart(model: Any, x: torch.Tensor, y: torch.Tensor, backward: _Backward) -> None:
    """Two losses, each over a part of the parameters."""
    backward(mse_loss(model.encoder(x).sum(1, keepdim=True), y))
    backward(mse_loss(model.head(model.encoder(x).detach()), y))


def forward_then_call(model: Any, x: torch.Tensor, y: torch.Tensor, backward: _Backward) -> None:
    backward(mse_loss(model.forward(x), y))
    backward(model(x).square().mean())


def a_look_before(model: Any, x: torch.Tensor, y: torch.Tensor, backward: _Backward) -> None:
    """A forward whose loss nobody needs."""
    model(x)
    backward(mse_loss(model.forward(x), y))


WAYS = [
    called, by_forward, by_parts, by_one_part, call_and_part, penalty_afterwards, penalty_first, two_parts_apart, forward_then_call,
    a_look_before,
]  # fmt: skip


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1, keepdim=True)


def build() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def by_hand(way: Callable[..., None]) -> torch.Tensor:
    """One process, whole batches."""
    model, optimizer = build()
    x, y = data()
    for start in range(0, ROWS, WINDOW):
        way(model, x[start : start + WINDOW], y[start : start + WINDOW], torch.Tensor.backward)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def train(way: Callable[..., None], steps: int) -> None:
    wanted = by_hand(way)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model, optimizer = build()
    loader = DataLoader(TensorDataset(*data()), batch_size=WINDOW // accelerator.num_processes // steps)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            way(model, x, y, accelerator.backward)
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.num_updates == ROWS // WINDOW
    assert are_equal_on_ranks(accelerator, model), "ranks drift apart"
    torch.testing.assert_close(weights(model), wanted)


def without_accumulate(way: Callable[..., None]) -> None:
    wanted = by_hand(way)
    accelerator = Accelerator(cpu=True)
    model, optimizer = build()
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(*data()), batch_size=WINDOW // 2)
    )
    for x, y in loader:
        way(model, x, y, accelerator.backward)
        optimizer.step()
        optimizer.zero_grad()
    assert are_equal_on_ranks(accelerator, model), "ranks drift apart"
    torch.testing.assert_close(weights(model), wanted)


def run(name: str) -> dict[str, str]:
    way = next(way for way in WAYS if way.__name__ == name)

    def one_micro_batch() -> None:
        train(way, 1)

    def two_micro_batches() -> None:
        train(way, 2)

    def outside() -> None:
        without_accumulate(way)

    return play([one_micro_batch, two_micro_batches, outside])


@pytest.mark.parametrize("name", [way.__name__ for way in WAYS])
def test_every_way_to_a_loss_reduces(name: str) -> None:
    for found in run_ranks(run, 2, name):
        assert not found, "\n".join(found.values())
