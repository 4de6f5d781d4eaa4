"""Tests of empty parameters, expanded buffers and lazy modules: they train as in plain PyTorch, or `prepare()` names them."""

from typing import Any

import pytest
import torch

from headway import Accelerator, TensorParallelOptions
from tests.distributed.ranks import RankFailed, run_ranks


class Net(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = torch.nn.LazyLinear(8) if kind == "lazy" else torch.nn.Linear(4, 8)
        self.middle, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)
        self.register_buffer("scale", torch.ones(1, 8).expand(3, 8) if kind == "expanded" else torch.ones(3, 8))
        if kind == "empty":
            self.empty = torch.nn.Parameter(torch.zeros(0, 4))
        if kind == "expanded parameter":
            self.factor = torch.nn.Parameter(torch.ones(1).expand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.last(torch.relu(self.middle(torch.relu(self.first(x)) * self.scale)))
        return x + self.empty.sum() if hasattr(self, "empty") else x


def build_model(kind: str, is_initialized: bool) -> Net:
    torch.manual_seed(0)
    net = Net(kind)
    if is_initialized:
        net(torch.ones(3, 4))
    return net


def train(model: Any, optimizer: Any, backward: Any) -> list[float]:
    losses = []
    for _ in range(2):
        loss = model(torch.arange(12.0).reshape(3, 4) / 9).square().mean()
        losses.append(float(loss.detach()))
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_prepared(layout: dict[str, Any], kind: str, is_initialized: bool, folder: str) -> list[float]:
    accelerator = Accelerator(cpu=True, **layout)
    net = build_model(kind, is_initialized)
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), 0.05))
    losses = train(model, optimizer, accelerator.backward)
    accelerator.save_state(f"{folder}/state")
    accelerator.load_state(f"{folder}/state")
    accelerator.save_model(model, f"{folder}/model")
    return losses + train(model, optimizer, accelerator.backward)


FSDP = {"strategy": "fsdp"}
PLAN = TensorParallelOptions(plan={"middle": "colwise", "last": "rowwise"})
TP = {"strategy": "tp", "kwargs_handlers": [PLAN]}
matrix = pytest.mark.matrix


@pytest.mark.parametrize(
    ("num_ranks", "layout", "kind", "is_initialized"),
    [
        (2, FSDP, "expanded", False),
        *(pytest.param(*each, "expanded", False, marks=matrix) for each in ((1, {}), (2, {}), (2, TP))),
        *(pytest.param(*each, "empty", False, marks=matrix) for each in ((1, {}), (2, {}), (2, TP))),
        *(pytest.param(*each, "lazy", True, marks=matrix) for each in ((1, {}), (2, {}), (2, FSDP))),
        pytest.param(1, {}, "lazy", False, marks=matrix),
    ],
    ids=str,
)
def test_unusual_tensors_train_as_in_plain_pytorch(
    num_ranks: int, layout: dict[str, Any], kind: str, is_initialized: bool, tmp_path: Any
) -> None:
    net = build_model(kind, is_initialized)
    optimizer = torch.optim.AdamW(net.parameters(), 0.05)
    expected = train(net, optimizer, torch.Tensor.backward) + train(net, optimizer, torch.Tensor.backward)
    losses = run_ranks(train_prepared, num_ranks, layout, kind, is_initialized, str(tmp_path))[0]
    assert losses == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("layout", "kind", "message"),
    [
        ({}, "lazy", "first.weight, first.bias of Net belong to lazy modules"),
        pytest.param(FSDP, "lazy", "belong to lazy modules", marks=matrix),
        pytest.param(FSDP, "empty", "empty of Net have no elements", marks=matrix),
        pytest.param({}, "expanded parameter", "elements of factor of Net share memory", marks=matrix),
    ],
    ids=str,
)
def test_tensors_that_cannot_be_distributed_are_named(
    layout: dict[str, Any], kind: str, message: str, tmp_path: Any
) -> None:
    with pytest.raises(RankFailed, match=message):
        run_ranks(train_prepared, 2, layout, kind, False, str(tmp_path))
