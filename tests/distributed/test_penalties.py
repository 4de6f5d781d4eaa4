"""Penalties on weights and on gradients under sharded layouts, over ragged windows, against a hand-written loop."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, DataLoaderConfiguration, TensorParallelOptions
from headway.core.strategies.fully_sharded.dtensors import explain_error
from headway.errors import UnsupportedError
from tests.devices import ON_CPU
from tests.distributed.layouts import GPT, seeded, text, whole_weights
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.on_device

ROWS, WINDOW, STEPS = 21, 8, 2
"""The last window has five rows: of the ranks of fsdp, one has more of them than the other."""


class Blocks(nn.Module):
    """Several units for FSDP."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2))
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)  # type: ignore[no-any-return]


PLAN = TensorParallelOptions(plan={"blocks.*.0": "colwise", "blocks.*.2": "rowwise"})


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1))
    return inputs, inputs[:, :2].square()


def penalised(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    inputs = inputs.clone().requires_grad_()
    outputs = model(inputs)
    (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return mse_loss(outputs, targets) + 0.1 * (slope.norm(dim=1) - 1).square().mean()


def weight_penalty(model: nn.Module) -> torch.Tensor:
    return 0.01 * sum(p.abs().sum() for p in model.parameters())


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Blocks()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def by_hand() -> dict[str, torch.Tensor]:
    model, optimizer = build()
    for _ in range(2):
        for inputs, targets in zip(*(tensor.split(WINDOW) for tensor in rows())):
            (penalised(model, inputs, targets) + weight_penalty(model)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return whole_weights(model)


def prepared(layout: str) -> dict[str, torch.Tensor]:
    accelerator = Accelerator(
        cpu=ON_CPU, strategy=layout, gradient_accumulation_steps=STEPS, kwargs_handlers=[PLAN] if layout == "tp" else [],
        dataloader_config=DataLoaderConfiguration(even_batches=False),
    )  # fmt: skip
    size = WINDOW // (STEPS * accelerator.strategy.data_shard.count)
    loader = DataLoader(TensorDataset(*rows()), batch_size=size)
    model, optimizer, loader = accelerator.prepare(*build(), loader)
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(penalised(model, inputs, targets))
                accelerator.backward(weight_penalty(model))
                optimizer.step()
                optimizer.zero_grad()
    return whole_weights(model)


def penalised_stages() -> None:
    """Each stage of a pipeline has some of the parameters only."""
    accelerator = Accelerator(cpu=ON_CPU, strategy="pp")
    model = accelerator.prepare(seeded(0, GPT))
    if not ON_CPU:  # torch itself adds nothing of the meta device to numbers on an accelerator
        with pytest.raises(RuntimeError) as error:
            weight_penalty(model)
        assert "weight_decay" in explain_error(error.value)
        return
    penalty = weight_penalty(model)
    for loss in (penalty, model(text()).square().mean() + penalty):
        with pytest.raises(UnsupportedError, match="weight_decay"):
            accelerator.backward(loss)
    accelerator.end_training()


def test_a_penalty_under_a_pipeline_is_an_error() -> None:
    run_ranks(penalised_stages, 2)


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_penalties_are_those_of_a_hand_written_loop(layout: str) -> None:
    wanted = by_hand()
    for found in run_ranks(prepared, 2, layout):
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(
                found[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
