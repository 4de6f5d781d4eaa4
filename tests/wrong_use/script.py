"""The script in which the table's mistakes are made: a tiny model, its data and its loop, with Headway and by hand."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, TensorParallelOptions
from headway.core.weights.pieces import is_dtensor

ROWS, STEPS, WINDOW = 32, 2, 8
"""Rows of data, micro-batches per update, and rows per update on all ranks together."""


class Net(nn.Module):
    """A tiny model with two matrices that tensor parallelism can split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


def net(make: Callable[[], nn.Module] = Net, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def make_data(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(rows, 4, generator=torch.Generator().manual_seed(1))
    return inputs, torch.stack([inputs.sum(1), inputs.square().mean(1)], 1)


class Script:
    """The common parts of a user's script in one layout.

    Attributes:
        layout: "single", "ddp", "fsdp" or "tp".
        folder: An initially empty folder, the same on all ranks.
        model: Model whose weights are compared at the end.
        rank: Rank of this process.
        num_ranks: Number of processes.
        shards: Number of parts into which the data is split.
    """

    def __init__(self, layout: str, folder: str) -> None:
        self.layout = layout
        self.folder = Path(folder)
        self.model: nn.Module = net()
        self.rank = int(os.environ["RANK"])
        self.num_ranks = 1 if layout == "single" else 2
        self.shards = 2 if layout in ("ddp", "fsdp") else 1

    def shorten_timeout(self) -> None:
        """Set a short timeout, so that a hanging run ends after seconds."""
        os.environ["HEADWAY_TIMEOUT"] = "2"

    def start(self, steps: int = STEPS, handlers: tuple[Any, ...] = (), **options: Any) -> Accelerator:
        plan = TensorParallelOptions(plan={"up": "colwise", "down": "rowwise"})
        return Accelerator(
            cpu=True,
            strategy=None if self.layout == "single" else self.layout,
            gradient_accumulation_steps=steps,
            kwargs_handlers=[*handlers, *([plan] if self.layout == "tp" else [])],
            **options,
        )

    def build(self, accelerator: Accelerator) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
        """Build a model, its optimizer, and a loader whose batches form windows of `WINDOW` rows."""
        self.model = net()
        return self.model, sgd(self.model), self.loader(accelerator)

    def loader(self, accelerator: Accelerator, rows: int = ROWS, **options: Any) -> DataLoader[Any]:
        size = WINDOW // (accelerator.gradient_accumulation_steps * accelerator.strategy.data_shard.count)
        return DataLoader(TensorDataset(*make_data(rows)), batch_size=size, **options)

    def prepare_all(self, **options: Any) -> tuple[Accelerator, Any, Any, Any]:
        accelerator = self.start(**options)
        return accelerator, *accelerator.prepare(*self.build(accelerator))


def train(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    """Run the loop without any mistake."""
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


# -------------------------------------------------------------------- by hand


def windows(size: int = WINDOW) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return zip(*(tensor.split(size) for tensor in make_data()))


def by_hand_loop(
    body: Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor], None],
) -> Callable[[Script], nn.Module]:
    """Return a loop in plain PyTorch that calls `body` for each window."""

    def run(s: Script) -> nn.Module:
        model = net()
        optimizer = sgd(model)
        for inputs, targets in windows():
            body(model, optimizer, inputs, targets)
        return model

    return run


@by_hand_loop
def train_by_hand(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor
) -> None:
    """Make one update in plain PyTorch, with the window as one batch."""
    mse_loss(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()


def collect_tensors(found: Any) -> list[torch.Tensor]:
    """Return the whole tensors of a model, a value, or a nested list of these."""
    if isinstance(found, nn.Module):
        return [gather_whole(tensor) for tensor in found.state_dict().values()]
    if isinstance(found, list | tuple):
        return [tensor for item in found for tensor in collect_tensors(item)]
    return [gather_whole(torch.as_tensor(found))]


def gather_whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if is_dtensor(tensor) else tensor).double().clone()  # type: ignore[attr-defined]
