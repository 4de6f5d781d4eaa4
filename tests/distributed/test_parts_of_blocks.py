"""A sharded model that uses a part of a block outside of the block's forward, as diffusers' DiT does.

The block's parameters are sharded again after its forward. The error names two options, with which the results equal those of a
hand-written loop.
"""

from typing import Any

import pytest
import torch
from torch import nn

from headway import Accelerator, ShardingOptions
from headway.core.strategies.fully_sharded.dtensor_errors import explain_error
from tests.devices import ON_CPU
from tests.distributed.layouts import gather_weights
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.on_device

ROWS, UPDATES = 8, 3
OPTIONS: list[dict[str, Any]] = [{"reshard_after_forward": False}, {"units": ["Mlp"]}]


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mlp = nn.Linear(4, 4), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x * self.embedding(x).sigmoid())  # type: ignore[no-any-return]


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x
        for block in self.blocks:
            x = block(x)
        first: Any = self.blocks[0]
        return self.last(x * first.embedding(rows))  # type: ignore[no-any-return]


def make_model() -> Transformer:
    torch.manual_seed(0)
    return Transformer().double()


def make_rows() -> torch.Tensor:
    return torch.randn(UPDATES, ROWS, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def train_by_hand() -> dict[str, torch.Tensor]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for rows in make_rows():
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return gather_weights(model)


def train_on_ranks() -> list[dict[str, torch.Tensor]]:
    """Train on this rank's half of the rows with each of the options. Return the whole weights."""
    results = []
    for options in OPTIONS:
        accelerator = Accelerator(
            cpu=ON_CPU, gradient_accumulation_steps=2, strategy="fsdp", kwargs_handlers=[ShardingOptions(**options)]
        )
        model = make_model()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for rows in make_rows():
            for part in rows.chunk(2)[accelerator.process_index].to(accelerator.device).chunk(2):
                with accelerator.accumulate(model):
                    accelerator.backward(model(part).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
        results.append(gather_weights(model))
    return results


def test_both_options_give_the_weights_of_the_hand_written_loop() -> None:
    expected = train_by_hand()
    for results in run_ranks(train_on_ranks, 2):
        for weights in results:
            for name, value in expected.items():
                torch.testing.assert_close(weights[name].cpu(), value, rtol=1e-9, atol=1e-11)


def call_with_default_units() -> str:
    accelerator = Accelerator(cpu=ON_CPU, strategy="fsdp")
    model = make_model()
    model = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor") as raised:
        model(make_rows()[0].to(accelerator.device))
    return explain_error(raised.value)


def test_the_error_with_default_units_names_both_options() -> None:
    for text in run_ranks(call_with_default_units, 2):
        assert "ShardingOptions(reshard_after_forward=False), or units= with smaller modules" in text
