"""Tests of parameters of a sharded model that are unfrozen in stages, or frozen again, during training."""

from typing import Any

import pytest
import torch

from headway import Accelerator
from tests.distributed.ranks import run_ranks


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(torch.relu(self.wide(x)))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(3))
        self.head = torch.nn.Linear(8, 1)
        for parameter in self.layers.parameters():
            parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


STAGES: dict[str, dict[int, list[tuple[int, bool]]]] = {
    "before the first update": {0: [(2, True)]},
    "one by one": {1: [(2, True)], 3: [(1, True)], 4: [(0, True)]},
    "all": {2: [(0, True), (1, True), (2, True)]},
    "frozen again": {1: [(2, True)], 3: [(2, False), (1, True)]},
}


def train(net: Any, model: Any, optimizer: Any, backward: Any, stages: str) -> list[float]:
    losses = []
    for number in range(6):
        for layer, requires_grad in STAGES[stages].get(number, []):
            net.layers[layer].requires_grad_(requires_grad)
        loss = model(torch.arange(32.0).reshape(4, 8) / 30).float().square().mean()
        losses.append(float(loss.detach()))
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_sharded(settings: dict[str, Any], stages: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    accelerator = Accelerator(cpu=True, **settings)
    torch.manual_seed(0)
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.02))
    losses = train(net, model, optimizer, accelerator.backward, stages)
    return losses, accelerator.get_state_dict(model)


FSDP = {"strategy": "fsdp"}


@pytest.mark.parametrize(
    ("settings", "stages"),
    [
        ({**FSDP, "mixed_precision": "bf16"}, "one by one"),
        *(
            pytest.param({**FSDP, "mixed_precision": precision}, stages, marks=pytest.mark.matrix)
            for precision in ("no", "bf16")
            for stages in STAGES
            if (precision, stages) != ("bf16", "one by one")
        ),
    ],
    ids=str,
)
def test_parameters_unfrozen_later_train_as_in_one_process(settings: dict[str, Any], stages: str) -> None:
    losses, state = run_ranks(train_sharded, 2, settings, stages)[0]
    torch.manual_seed(0)
    net = Net()
    dtype = {"no": torch.float32, "bf16": torch.bfloat16}[settings["mixed_precision"]]

    def model(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            return net(x)

    optimizer = torch.optim.SGD(net.parameters(), 0.02)
    expected = train(net, model, optimizer, torch.Tensor.backward, stages)
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    assert losses == pytest.approx(expected, rel=tolerance)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=tolerance, atol=tolerance, msg=name)
