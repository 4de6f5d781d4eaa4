"""Penalties on weights and on gradients in sharded layouts, over ragged windows, compared with a hand-written loop."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, DataLoaderConfiguration, TensorParallelOptions
from headway.core.strategies.fully_sharded.dtensor_errors import explain_error
from headway.errors import UnsupportedError
from tests.devices import ON_CPU
from tests.distributed.layouts import GPT, build_seeded, gather_weights, make_tokens
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.on_device

ROWS, WINDOW, STEPS = 21, 8, 2
"""The last window has five rows, so one FSDP rank has more rows than the other."""


class Blocks(nn.Module):
    """Model with several FSDP units."""

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


def make_rows() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1))
    return inputs, inputs[:, :2].square()


def compute_penalized_loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    inputs = inputs.clone().requires_grad_()
    outputs = model(inputs)
    (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return mse_loss(outputs, targets) + 0.1 * (slope.norm(dim=1) - 1).square().mean()


def compute_weight_penalty(model: nn.Module) -> torch.Tensor:
    return 0.01 * sum(p.abs().sum() for p in model.parameters())


def make_parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Blocks()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_by_hand() -> dict[str, torch.Tensor]:
    model, optimizer = make_parts()
    for _ in range(2):
        for inputs, targets in zip(*(tensor.split(WINDOW) for tensor in make_rows())):
            (compute_penalized_loss(model, inputs, targets) + compute_weight_penalty(model)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return gather_weights(model)


def train_prepared(layout: str) -> dict[str, torch.Tensor]:
    accelerator = Accelerator(
        cpu=ON_CPU, strategy=layout, gradient_accumulation_steps=STEPS, kwargs_handlers=[PLAN] if layout == "tp" else [],
        dataloader_config=DataLoaderConfiguration(even_batches=False),
    )  # fmt: skip
    size = WINDOW // (STEPS * accelerator.strategy.data_shard.count)
    loader = DataLoader(TensorDataset(*make_rows()), batch_size=size)
    model, optimizer, loader = accelerator.prepare(*make_parts(), loader)
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(compute_penalized_loss(model, inputs, targets))
                accelerator.backward(compute_weight_penalty(model))
                optimizer.step()
                optimizer.zero_grad()
    return gather_weights(model)


def penalize_stages() -> None:
    """Check that a penalty in a pipeline is an error, because each stage has only some of the parameters."""
    accelerator = Accelerator(cpu=ON_CPU, strategy="pp")
    model = accelerator.prepare(build_seeded(0, GPT))
    if not ON_CPU:  # torch cannot add a meta tensor to a number on an accelerator
        with pytest.raises(RuntimeError) as error:
            compute_weight_penalty(model)
        assert "weight_decay" in explain_error(error.value)
        return
    penalty = compute_weight_penalty(model)
    for loss in (penalty, model(make_tokens()).square().mean() + penalty):
        with pytest.raises(UnsupportedError, match="weight_decay"):
            accelerator.backward(loss)
    accelerator.end_training()


def test_penalty_in_a_pipeline_is_an_error() -> None:
    run_ranks(penalize_stages, 2)


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_penalties_match_the_hand_written_loop(layout: str) -> None:
    expected = train_by_hand()
    for found in run_ranks(train_prepared, 2, layout):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(
                found[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
