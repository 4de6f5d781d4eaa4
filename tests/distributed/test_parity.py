"""Plain PyTorch, Headway on one process and Headway on two agree in losses, gradient norms and weights."""

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
    """One row of the table. Batch sizes are those over all ranks."""

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


def make_parts(recipe: Recipe) -> tuple[list[nn.Module], list[torch.optim.Optimizer], torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)) for _ in range(recipe.num_models)]
    rules = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.02),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    }
    optimizers = [rules[recipe.kind](model.parameters()) for model in models]
    x = torch.randn(recipe.num_rows, 4)
    return models, optimizers, x, x.sum(1, keepdim=True) + 0.1 * torch.randn(recipe.num_rows, 1)


def collect_results(losses: list[float], norms: list[float], models: list[nn.Module]) -> dict[str, torch.Tensor]:
    weights = torch.cat([p.detach().flatten() for model in models for p in model.parameters()])
    return {"losses": torch.tensor(losses), "norms": torch.tensor(norms), "weights": weights.cpu()}


def train_by_hand(recipe: Recipe) -> dict[str, torch.Tensor]:
    """Train whole windows in float32 with plain PyTorch."""
    models, optimizers, x, y = make_parts(recipe)
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
    return collect_results(losses, norms, models)


def train_with_headway(recipe: Recipe) -> dict[str, torch.Tensor]:
    """Train with Headway. Each logged loss is the exact mean over a window."""
    models, optimizers, x, y = make_parts(recipe)
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
    found = collect_results(losses, norms, models)
    # each model's window is a separate update
    assert accelerator.num_updates == len(losses)
    return found


# ---------------------------------------------------------------- scenarios with several processes


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.used, self.spare = nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(self.body(x))


def buffers_follow_rank_0() -> None:
    """BatchNorm statistics equal those of rank 0 after each update."""
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
    results = accelerator.gather(model.weight[None])
    assert torch.equal(results[0], results[1])


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
    results = accelerator.gather(model.used.weight[None])
    assert torch.equal(results[0], results[1])


def frozen_models() -> None:
    """A fully frozen model needs no engine. A partly frozen one trains although all its parameters are in the optimizer."""
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
    results = accelerator.gather(model.used.weight[None])
    assert torch.equal(results[0], results[1])
    assert accelerator.num_updates == 2
    assert all(torch.equal(value.cpu(), before[name]) for name, value in model.spare.state_dict().items())


def unsupported_models_are_errors() -> None:
    accelerator = Accelerator(cpu=ON_CPU)
    with pytest.raises(PrepareError, match="on the meta device"):
        accelerator.prepare(nn.Linear(2, 2, device="meta"))
    with pytest.raises(PrepareError, match="DistributedDataParallel; give the bare model"):
        accelerator.prepare(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))
    compressed = Accelerator(cpu=ON_CPU, kwargs_handlers=[DistributedDataParallelKwargs(comm_hook="bf16")])
    if ON_CPU:
        with pytest.raises(UnsupportedError, match="bf16 communication hook needs NCCL"):
            compressed.prepare(nn.Linear(2, 2))
    unrelated_optimizer = accelerator.prepare_optimizer(torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.1))
    model = accelerator.prepare_model(nn.Linear(2, 2))
    accelerator.backward(model(torch.ones(1, 2, device=DEVICE)).mean())
    with pytest.raises(PrepareError, match="belong to no prepared model"):
        unrelated_optimizer.step()


SCENARIOS = [
    buffers_follow_rank_0, ranks_start_from_rank_0, unused_parameters_are_named, unused_parameters_can_be_allowed,
    frozen_models, unsupported_models_are_errors,
]  # fmt: skip


def run_rows_and_scenarios() -> dict[str, Any]:
    """Return each row's result, and the traceback of each failed row and scenario."""
    found: dict[str, Any] = {}
    for name, recipe in TABLE.items():
        try:
            found[name] = train_with_headway(recipe)
        except Exception:
            found[name] = traceback.format_exc()
    for scenario in SCENARIOS:
        try:
            found[scenario.__name__] = scenario()
        except Exception:
            found[scenario.__name__] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(run_rows_and_scenarios, 2)


@pytest.mark.parametrize("name", TABLE)
def test_two_processes_match_one_process_and_plain_pytorch(name: str, results: list[dict[str, Any]]) -> None:
    recipe = TABLE[name]
    assert isinstance(results[0][name], dict), results[0][name]
    assert isinstance(results[1][name], dict), results[1][name]
    expected, single = train_by_hand(recipe), train_with_headway(recipe)
    for what in ("losses", "norms", "weights"):
        assert torch.equal(results[0][name][what], results[1][name][what]), f"{what} differ between ranks"
        for found in (single, results[0][name]):
            torch.testing.assert_close(found[what], expected[what], rtol=recipe.tolerance, atol=recipe.tolerance)


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_scenario_on_two_processes(name: str, results: list[dict[str, Any]]) -> None:
    reports = [f"rank {rank}: {found[name]}" for rank, found in enumerate(results) if found[name] is not None]
    assert not reports, "\n".join(reports)
