"""The parity table: plain PyTorch = Headway on one process = Headway on two, in losses, gradient norms and weights."""

import copy
import traceback
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs
from headway.errors import PrepareError, UnsupportedError
from tests.devices import DEVICE, ON_CPU
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.on_device

EPOCHS = 3


@dataclass(frozen=True)
class Recipe:
    """One row of the table; batch sizes are global."""

    num_rows: int = 32
    batch_size: int = 8
    steps: int = 1
    precision: str = "no"
    even: bool = True
    num_models: int = 1
    kind: str = "adamw"
    ddp: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 2e-5


TABLE = {
    "fp32": Recipe(),
    "sgd": Recipe(kind="sgd"),
    "accumulation": Recipe(num_rows=48, batch_size=4, steps=3),
    "short last window": Recipe(num_rows=40, batch_size=4, steps=4),
    "ragged tail, uneven": Recipe(num_rows=37, even=False),
    "ragged tail, uneven, accumulation": Recipe(num_rows=37, batch_size=6, steps=4, even=False),
    "ragged tail, even, masked": Recipe(num_rows=37),
    "ragged tail, even, accumulation": Recipe(num_rows=35, batch_size=4, steps=4),
    "several models and optimizers": Recipe(num_models=2, num_rows=37, steps=2),
    "bf16": Recipe(precision="bf16", steps=2, tolerance=2e-2),
    "static graph": Recipe(ddp={"static_graph": True}),
    "static graph, accumulation": Recipe(ddp={"static_graph": True}, steps=2),
    "find unused": Recipe(ddp={"find_unused_parameters": True}, steps=2),
    "bucket views": Recipe(ddp={"gradient_as_bucket_view": True}, steps=2, num_rows=37),
    "fp16 hook": Recipe(ddp={"comm_hook": "fp16"}, steps=2, tolerance=1e-2),
    "power_sgd hook": Recipe(
        ddp={"comm_hook": "power_sgd", "comm_state_option": {"matrix_approximation_rank": 4, "start_powerSGD_iter": 2}},
        tolerance=1e-3,
    ),
    "power_sgd hook in fp16": Recipe(
        ddp={"comm_hook": "power_sgd", "comm_wrapper": "fp16",
             "comm_state_option": {"matrix_approximation_rank": 4, "start_powerSGD_iter": 2}},
        tolerance=1e-2,
    ),
}  # fmt: skip


def make(recipe: Recipe) -> tuple[list[nn.Module], list[torch.optim.Optimizer], torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)) for _ in range(recipe.num_models)]
    rules = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.02),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    }
    optimizers = [rules[recipe.kind](model.parameters()) for model in models]
    x = torch.randn(recipe.num_rows, 4)
    return models, optimizers, x, x.sum(1, keepdim=True) + 0.1 * torch.randn(recipe.num_rows, 1)


def result(losses: list[float], norms: list[float], models: list[nn.Module]) -> dict[str, torch.Tensor]:
    weights = torch.cat([p.detach().flatten() for model in models for p in model.parameters()])
    return {"losses": torch.tensor(losses), "norms": torch.tensor(norms), "weights": weights.cpu()}


def plain(recipe: Recipe) -> dict[str, torch.Tensor]:
    """The hand-written loop over whole windows, in float32."""
    models, optimizers, x, y = make(recipe)
    losses, norms, size = [], [], recipe.batch_size * recipe.steps
    for _ in range(EPOCHS):
        for start in range(0, recipe.num_rows, size):
            for model, optimizer in zip(models, optimizers):
                loss = mse_loss(model(x[start : start + size]), y[start : start + size])
                loss.backward()
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    return result(losses, norms, models)


def headway(recipe: Recipe) -> dict[str, torch.Tensor]:
    """The same loop with the five lines changed; the loss curve is the exact mean over each window."""
    models, optimizers, x, y = make(recipe)
    accelerator = Accelerator(
        cpu=ON_CPU, mixed_precision=recipe.precision, gradient_accumulation_steps=recipe.steps,
        dataloader_config=DataLoaderConfiguration(even_batches=recipe.even),
        kwargs_handlers=[DistributedDataParallelKwargs(**recipe.ddp)],
    )  # fmt: skip
    loader = DataLoader(TensorDataset(x, y), batch_size=recipe.batch_size // accelerator.num_processes)
    loader, *prepared = accelerator.prepare(loader, *models, *optimizers)
    models, optimizers = prepared[: recipe.num_models], prepared[recipe.num_models :]
    losses, norms = [], []
    sums = [[0.0, 0] for _ in models]
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            for index, (model, optimizer) in enumerate(zip(models, optimizers)):
                with accelerator.accumulate(model):
                    errors = (model(inputs).float() - targets).square()
                    real = errors if loader.mask is None else errors[loader.mask]
                    accelerator.backward(real.sum(), weight=len(real), reduction="sum")
                    sums[index][0] += real.sum().item()
                    sums[index][1] += len(real)
                    if accelerator.sync_gradients:
                        norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
                        losses.append(float(accelerator.reduce_mean(*sums[index])))
                        sums[index] = [0.0, 0]
                    optimizer.step()
                    optimizer.zero_grad()
    found = result(losses, norms, models)
    # Windows of several models are updates of their own.
    assert accelerator.num_updates == len(losses)
    return found


# ---------------------------------------------------------------- what only several processes have


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.used, self.spare = nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(self.body(x))


def buffers_are_equal() -> None:
    """Running statistics follow rank 0 at each update, as rank 0 alone would have made them."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=ON_CPU, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(accelerator.process_index)
    for step in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(4, 2, generator=generator).to(DEVICE)).square().mean(), weight=4)
            optimizer.step()
            optimizer.zero_grad()
        mean, count = accelerator.gather((model[1].running_mean[None], model[1].num_batches_tracked))
        assert torch.equal(mean[0], mean[1]) == (step % 2 == 1)
        assert count.tolist() == [step + 1] * 2


def ranks_start_from_rank_0() -> None:
    accelerator = Accelerator(cpu=ON_CPU)
    torch.manual_seed(accelerator.process_index)
    model = accelerator.prepare(nn.Linear(2, 2))
    both = accelerator.gather(model.weight[None])
    assert torch.equal(both[0], both[1])


def unused_parameters_are_named() -> None:
    accelerator = Accelerator(cpu=ON_CPU)
    model = accelerator.prepare(Heads())
    accelerator.backward(model(torch.ones(1, 2, device=DEVICE)).mean())
    with pytest.raises(UnsupportedError, match=r"of Heads took no part in the last loss: spare.weight, spare.bias\."):
        model(torch.ones(1, 2, device=DEVICE))


def unused_parameters_can_be_allowed() -> None:
    options = [DistributedDataParallelKwargs(find_unused_parameters=True)]
    accelerator = Accelerator(cpu=ON_CPU, kwargs_handlers=options, gradient_accumulation_steps=2)
    model = Heads()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(
                model(torch.full((1, 2), 1.0 + accelerator.process_index, device=DEVICE)).mean(), weight=1
            )
            optimizer.step()
            optimizer.zero_grad()
    both = accelerator.gather(model.used.weight[None])
    assert torch.equal(both[0], both[1])


def frozen_models() -> None:
    """A wholly frozen model needs no engine; a partly frozen one trains, with all of it in the optimizer."""
    accelerator = Accelerator(cpu=ON_CPU)
    torch.manual_seed(0)
    frozen, model = nn.Linear(2, 2).requires_grad_(False), Heads()
    model.spare.requires_grad_(False)
    before = copy.deepcopy(model.spare.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    frozen, model, optimizer = accelerator.prepare(frozen, model, optimizer)
    for _ in range(2):
        x = torch.full((1, 2), 1.0 + accelerator.process_index, device=DEVICE)
        accelerator.backward(model(frozen(x)).mean(), weight=1)
        optimizer.step()
        optimizer.zero_grad()
    both = accelerator.gather(model.used.weight[None])
    assert torch.equal(both[0], both[1])
    assert accelerator.num_updates == 2
    assert all(torch.equal(value.cpu(), before[name]) for name, value in model.spare.state_dict().items())


def what_cannot_be() -> None:
    accelerator = Accelerator(cpu=ON_CPU)
    with pytest.raises(PrepareError, match="on the meta device"):
        accelerator.prepare(nn.Linear(2, 2, device="meta"))
    with pytest.raises(PrepareError, match="DistributedDataParallel; give the bare model"):
        accelerator.prepare(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))
    compressed = Accelerator(cpu=ON_CPU, kwargs_handlers=[DistributedDataParallelKwargs(comm_hook="bf16")])
    if ON_CPU:
        with pytest.raises(UnsupportedError, match="bf16 communication hook needs NCCL"):
            compressed.prepare(nn.Linear(2, 2))
    stranger = accelerator.prepare_optimizer(torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.1))
    model = accelerator.prepare_model(nn.Linear(2, 2))
    accelerator.backward(model(torch.ones(1, 2, device=DEVICE)).mean())
    with pytest.raises(PrepareError, match="belong to no prepared model"):
        stranger.step()


SCENARIOS = [
    buffers_are_equal, ranks_start_from_rank_0, unused_parameters_are_named, unused_parameters_can_be_allowed,
    frozen_models, what_cannot_be,
]  # fmt: skip


def play() -> dict[str, Any]:
    """Each row's result, and what went wrong in each scenario."""
    found: dict[str, Any] = {}
    for name, recipe in TABLE.items():
        try:
            found[name] = headway(recipe)
        except Exception:
            found[name] = traceback.format_exc()
    for scenario in SCENARIOS:
        try:
            found[scenario.__name__] = scenario()
        except Exception:
            found[scenario.__name__] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def both() -> list[dict[str, Any]]:
    return run_ranks(play, 2)


@pytest.mark.parametrize("name", TABLE)
def test_plain_is_single_is_two_processes(name: str, both: list[dict[str, Any]]) -> None:
    recipe = TABLE[name]
    assert isinstance(both[0][name], dict), both[0][name]
    assert isinstance(both[1][name], dict), both[1][name]
    wanted, single = plain(recipe), headway(recipe)
    for what in ("losses", "norms", "weights"):
        assert torch.equal(both[0][name][what], both[1][name][what]), f"{what} differ between ranks"
        for found in (single, both[0][name]):
            torch.testing.assert_close(found[what], wanted[what], rtol=recipe.tolerance, atol=recipe.tolerance)


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_on_two_processes(name: str, both: list[dict[str, Any]]) -> None:
    told = [f"rank {rank}: {found[name]}" for rank, found in enumerate(both) if found[name] is not None]
    assert not told, "\n".join(told)
