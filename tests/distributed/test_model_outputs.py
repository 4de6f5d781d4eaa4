"""Models and blocks of sharded models that return objects instead of tensors, compared with a hand-written loop.

FSDP and DDP themselves find the tensors in lists, tuples, dicts and dataclasses only. For other objects, FSDP would not gather
parameters for backward, and would not reduce their gradients. With `find_unused_parameters=True`, DDP would treat parameters as
unused, although the loss depends on them.
"""

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Independent, Normal
from torch.nn.functional import mse_loss

from headway import Accelerator, DistributedDataParallelKwargs, ShardingOptions
from tests.devices import ON_CPU
from tests.distributed.layouts import gather_weights
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.on_device

ROWS, UPDATES = 8, 4


class Features:
    def __init__(self, values: torch.Tensor) -> None:
        self.values = {"hidden": [values]}


class Slots:
    __slots__ = ("hidden",)

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


@dataclass
class Record:
    hidden: torch.Tensor


WRAPPERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "object": (Features, lambda output: output.values["hidden"][0]),
    "slots": (Slots, lambda output: output.hidden),
    "record": (Record, lambda output: output.hidden),
    "user dict": (lambda hidden: UserDict(hidden=hidden), lambda output: output["hidden"]),
    "distribution": (lambda hidden: Independent(Normal(hidden, 1.0), 1), lambda output: output.mean),
    "pair": (lambda hidden: (Normal(hidden, 1.0), hidden), lambda output: output[0].loc + output[1]),
}
"""Functions that wrap the tensor that a block returns, and that read it again."""


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.wrap, self.unwrap = WRAPPERS[kind]

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(self.down(self.up(x).tanh()))


class Policy(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.last = nn.Linear(8, 3)
        self.wrap = WRAPPERS[kind][0]

    def compute_logits(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block.unwrap(block(x))
        return self.last(x)

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(self.compute_logits(x))

    def act(self, x: torch.Tensor) -> Categorical:
        return Categorical(logits=self.compute_logits(x))


def compute_loss(model: Any, kind: str, rows: torch.Tensor) -> torch.Tensor:
    if kind == "method":
        return -model.act(rows).log_prob(rows[:, 0].gt(0).long()).mean()  # type: ignore[no-any-return]
    unwrap = WRAPPERS[kind][1]
    if kind != "record":
        return mse_loss(unwrap(model(rows)), rows[:, :3].sin())
    # A gradient penalty: Headway must notice the first backward through the output.
    rows = rows.clone().requires_grad_()
    outputs = unwrap(model(rows))
    (slope,) = torch.autograd.grad(outputs.sum(), rows, create_graph=True)
    return mse_loss(outputs, rows[:, :3].sin()) + (slope.norm(dim=1) - 1).square().mean()


def make_policy(kind: str) -> Policy:
    torch.manual_seed(0)
    return Policy("object" if kind == "method" else kind)


def make_rows() -> torch.Tensor:
    return torch.randn(UPDATES, ROWS, 4, generator=torch.Generator().manual_seed(1))


def train_by_hand(kind: str) -> dict[str, torch.Tensor]:
    model = make_policy(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for rows in make_rows():
        compute_loss(model, kind, rows).backward()
        optimizer.step()
        optimizer.zero_grad()
    return gather_weights(model)


def train_on_ranks(layout: str) -> dict[str, dict[str, torch.Tensor]]:
    """Train a model of each kind on this rank's half of the rows. Return its whole weights."""
    results = {}
    for kind in (*WRAPPERS, "method"):
        options = (
            ShardingOptions(forward_methods=("act",)) if layout == "fsdp" and kind == "method" else ShardingOptions()
        )
        accelerator = Accelerator(cpu=ON_CPU, strategy=layout, kwargs_handlers=[options] if layout == "fsdp" else [])
        model = make_policy(kind)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for rows in make_rows():
            with accelerator.accumulate(model):
                half = rows.chunk(2)[accelerator.process_index].to(accelerator.device)
                accelerator.backward(compute_loss(model, kind, half))
                optimizer.step()
                optimizer.zero_grad()
        results[kind] = gather_weights(model)
    return results


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_outputs_in_objects_get_the_gradients_of_the_hand_written_loop(layout: str) -> None:
    for results in run_ranks(train_on_ranks, 2, layout):
        for kind, found in results.items():
            for name, expected in train_by_hand(kind).items():
                torch.testing.assert_close(
                    found[name].cpu(), expected, rtol=1e-4, atol=1e-5,
                    msg=lambda text, kind=kind, name=name: f"{kind}, {name}: {text}",
                )  # fmt: skip


class Experts(nn.Module):
    """Model that returns an object, uses one of two layers, and calls itself for a batch of more than `ROWS / 4` rows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 3) for _ in range(2))
        self.wrap, self.unwrap = WRAPPERS[kind]

    def forward(self, x: torch.Tensor, number: int) -> Any:
        if len(x) > ROWS // 4:
            parts = [self(part, number) for part in x.split(ROWS // 4)]
            assert all(type(part) is type(parts[0]) is type(self.wrap(x)) for part in parts)
            return self.wrap(torch.cat([self.unwrap(part) for part in parts]))
        return self.wrap(self.layers[number](x).tanh())


def train_experts(
    model: Any, optimizer: Any, backward: Callable[[torch.Tensor], Any], rank: int, num_ranks: int
) -> None:
    """Make the updates of a rank. Rank 0 uses the first layer, and rank 1 the second one in odd updates."""
    for number, rows in enumerate(make_rows()):
        for part in range(num_ranks):
            chosen = part if num_ranks == 2 else rank
            half = rows.chunk(2)[chosen]
            output = model.unwrap(model(half, number % 2 if chosen else 0))
            backward(mse_loss(output, half[:, :3].sin()) / num_ranks)
        optimizer.step()
        optimizer.zero_grad()


def train_experts_on_ranks() -> dict[str, dict[str, torch.Tensor]]:
    results = {}
    for kind in WRAPPERS:
        options = DistributedDataParallelKwargs(find_unused_parameters=True)
        accelerator = Accelerator(cpu=True, strategy="ddp", kwargs_handlers=[options])
        torch.manual_seed(0)
        model = Experts(kind)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        assert type(model(torch.zeros(1, 4), 0)) is type(model.wrap(torch.zeros(1, 3)))
        train_experts(model, optimizer, accelerator.backward, accelerator.process_index, 1)
        results[kind] = gather_weights(model)
        accelerator.free_memory()
    return results


def test_ddp_finds_unused_parameters_of_outputs_in_objects() -> None:
    ranks = run_ranks(train_experts_on_ranks, 2)
    for kind in WRAPPERS:
        torch.manual_seed(0)
        model = Experts(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        train_experts(model, optimizer, torch.Tensor.backward, 0, 2)
        for results in ranks:
            for name, expected in model.state_dict().items():
                torch.testing.assert_close(results[kind][name], expected, rtol=1e-5, atol=1e-6)
