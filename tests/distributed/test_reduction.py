"""DDP reduces gradients however a loss is computed: by calling the model, by its `forward`, from a submodule, or in two parts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator
from tests.distributed.ranks import run_ranks
from tests.distributed.scenarios import are_equal_on_ranks, flatten_weights, run_scenarios

ROWS, WINDOW = 32, 8
_Backward = Callable[[torch.Tensor], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


def call_model(model: Any, x: torch.Tensor, y: torch.Tensor, backward: _Backward) -> None:
    backward(mse_loss(model(x), y))


def call_forward(model: Any, x: torch.Tensor, y: torch.Tensor, backward: _Backward) -> None:
    backward(mse_loss(model.forward(x), y))


def call_submodules(model: Any, x: torch.Tensor, y: torch.Tensor, backward: _Backward) -> None:
    backward(mse_loss(model.head(model.encoder(x)), y))


def call_one_submodule(model: Any, x: torch.Tensor, y: torch.Tensor, backward: _Backward) -> None:
    """Compute a loss from the encoder only, so that the head gets no gradient."""
    backward(mse_loss(model.encoder(x).sum(1, keepdim=True), y))


def call_model_and_submodule(model: Any, x: torch.Tensor, y: torch.Tensor, backward: _Backward) -> None:
    backward(mse_loss(model(x), y) + model.encoder(x).square().mean())


def add_penalty_afterwards(model: Any, x: torch.Tensor, y: torch.Tensor, backward: _Backward) -> None:
    """Add a second loss that covers some of the parameters and uses no forward pass."""
    backward(mse_loss(model(x), y))
    backward(0.01 * sum(p.abs().sum() for p in model.parameters() if p.ndim > 1))


def add_penalty_first(model: Any, x: torch.Tensor, y: torch.Tensor, backward: _Backward) -> None:
    backward(0.01 * sum(p.abs().sum() for p in model.parameters() if p.ndim > 1))
    backward(mse_loss(model(x), y))


def compute_two_separate_losses(model: Any, x: torch.Tensor, y: torch.Tensor, backward: _Backward) -> None:
    """Compute two losses, each for a part of the parameters."""
    backward(mse_loss(model.encoder(x).sum(1, keepdim=True), y))
    backward(mse_loss(model.head(model.encoder(x).detach()), y))


def call_forward_then_model(model: Any, x: torch.Tensor, y: torch.Tensor, backward: _Backward) -> None:
    backward(mse_loss(model.forward(x), y))
    backward(model(x).square().mean())


def call_model_without_loss_first(model: Any, x: torch.Tensor, y: torch.Tensor, backward: _Backward) -> None:
    """Call the model once without using its output, and then compute a loss."""
    model(x)
    backward(mse_loss(model.forward(x), y))


WAYS = [
    call_model, call_forward, call_submodules, call_one_submodule, call_model_and_submodule, add_penalty_afterwards,
    add_penalty_first, compute_two_separate_losses, call_forward_then_model, call_model_without_loss_first,
]  # fmt: skip


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1, keepdim=True)


def make_parts() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_by_hand(way: Callable[..., None]) -> torch.Tensor:
    """Train with whole batches on one process in plain PyTorch."""
    model, optimizer = make_parts()
    x, y = make_data()
    for start in range(0, ROWS, WINDOW):
        way(model, x[start : start + WINDOW], y[start : start + WINDOW], torch.Tensor.backward)
        optimizer.step()
        optimizer.zero_grad()
    return flatten_weights(model)


def train(way: Callable[..., None], steps: int) -> None:
    expected = train_by_hand(way)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model, optimizer = make_parts()
    loader = DataLoader(TensorDataset(*make_data()), batch_size=WINDOW // accelerator.num_processes // steps)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            way(model, x, y, accelerator.backward)
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.num_updates == ROWS // WINDOW
    assert are_equal_on_ranks(accelerator, model), "weights differ between ranks"
    torch.testing.assert_close(flatten_weights(model), expected)


def train_without_accumulate(way: Callable[..., None]) -> None:
    expected = train_by_hand(way)
    accelerator = Accelerator(cpu=True)
    model, optimizer = make_parts()
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(*make_data()), batch_size=WINDOW // 2)
    )
    for x, y in loader:
        way(model, x, y, accelerator.backward)
        optimizer.step()
        optimizer.zero_grad()
    assert are_equal_on_ranks(accelerator, model), "weights differ between ranks"
    torch.testing.assert_close(flatten_weights(model), expected)


def run_way(name: str) -> dict[str, str]:
    way = next(way for way in WAYS if way.__name__ == name)

    def one_micro_batch() -> None:
        train(way, 1)

    def two_micro_batches() -> None:
        train(way, 2)

    def outside() -> None:
        train_without_accumulate(way)

    return run_scenarios([one_micro_batch, two_micro_batches, outside])


@pytest.mark.parametrize("name", [way.__name__ for way in WAYS])
def test_gradients_are_reduced_for_every_way_to_compute_a_loss(name: str) -> None:
    for found in run_ranks(run_way, 2, name):
        assert not found, "\n".join(found.values())
