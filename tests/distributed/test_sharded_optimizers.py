"""Optimizers on sharded parameters have the losses of one process, and their states continue in another layout."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim

from headway import Accelerator, LocalSGD
from tests.distributed.layouts import GPT, build_seeded, make_tokens, mean_square
from tests.distributed.ranks import run_ranks

Make = Callable[[list[torch.nn.Parameter]], Any]


def select_matrices(parameters: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [p for p in parameters if p.ndim == 2]


def make_optimizers() -> dict[str, Make]:
    found: dict[str, Make] = {
        "foreach AdamW": lambda ps: optim.AdamW(ps, lr=0.01, foreach=True, amsgrad=True),
        "fused AdamW": lambda ps: optim.AdamW(ps, lr=0.01, fused=True),
        "Adagrad": lambda ps: optim.Adagrad(ps, lr=0.01, foreach=True),
        "Adadelta": lambda ps: optim.Adadelta(ps, lr=0.1),
        "RMSprop": lambda ps: optim.RMSprop(ps, lr=0.01, momentum=0.9, centered=True),
        "NAdam": lambda ps: optim.NAdam(ps, lr=0.01),
        "RAdam": lambda ps: optim.RAdam(ps, lr=0.01),
        "Adamax": lambda ps: optim.Adamax(ps, lr=0.01),
        "ASGD": lambda ps: optim.ASGD(ps, lr=0.01),
        "Muon": lambda ps: optim.Muon(select_matrices(ps), lr=0.01),
        "LBFGS": lambda ps: optim.LBFGS(ps, lr=0.1, max_iter=2, history_size=3, line_search_fn="strong_wolfe"),
    }
    try:
        import schedulefree
    except ImportError:
        return found
    found["schedule-free AdamW"] = lambda ps: schedulefree.AdamWScheduleFree(ps, lr=0.01)
    found["schedule-free SGD"] = lambda ps: schedulefree.SGDScheduleFree(ps, lr=0.01)
    found["schedule-free RAdam"] = lambda ps: schedulefree.RAdamScheduleFree(ps, lr=0.01)
    return found


def make_update(accelerator: Accelerator, model: torch.nn.Module, optimizer: Any, ids: torch.Tensor) -> float:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = mean_square(model, ids)
        accelerator.backward(loss)
        return loss

    with accelerator.accumulate(model):
        loss = mean_square(model, ids)
        accelerator.backward(loss)
        optimizer.step(closure if isinstance(optimizer.optimizer, optim.LBFGS) else None)
        optimizer.zero_grad()
    return loss.item()


def train(layout: str, make: Make, save: str = "", load: str = "") -> list[float]:
    """Return the losses of four updates and the final loss. With `save`, save before the third update; `load` continues there."""
    accelerator = Accelerator(cpu=True, strategy=layout)
    built = build_seeded(0, GPT)
    built, optimizer = accelerator.prepare(built, make(list(built.parameters())))
    optimizer.train()
    losses = []
    if load:
        accelerator.load_state(load)
    for seed in range(2 if load else 0, 4):
        if save and seed == 2:
            accelerator.save_state(save, blocking=True)
        losses.append(make_update(accelerator, built, optimizer, make_tokens(seed)))
    optimizer.eval()
    losses.append(mean_square(built, make_tokens()).item())
    accelerator.free_memory()
    return losses


def train_all(layout: str, save: str = "", load: str = "") -> dict[str, list[float]]:
    return {
        name: train(layout, make, save and str(Path(save, name)), load and str(Path(load, name)))
        for name, make in make_optimizers().items()
    }


@pytest.mark.slow
def test_optimizers_on_shards_match_one_process(tmp_path):
    (plain,) = run_ranks(train_all, 1, "ddp", timeout=250)
    sharded, _ = run_ranks(train_all, 2, "fsdp", str(tmp_path), timeout=250)
    (resumed,) = run_ranks(train_all, 1, "ddp", "", str(tmp_path), timeout=250)
    for name, expected in plain.items():
        close = 1e-2 if name == "Muon" else 1e-5
        assert sharded[name] == pytest.approx(expected, rel=close), name
        assert resumed[name] == pytest.approx(sharded[name][2:], rel=close), name
        assert expected[0] != expected[2]


def minimize(layout: str | None, line_search: str | None, save: str = "", load: str = "") -> torch.Tensor:
    """Return the weights after four LBFGS updates, each on this rank's rows, or on all rows without a layout.

    With `save`, save before the third update. With `load`, load this checkpoint and make only the last two updates.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    targets = inputs[:, :2].sin()
    optimizer: Any = optim.LBFGS(model.parameters(), lr=0.5, line_search_fn=line_search)
    backward: Any = torch.Tensor.backward
    if layout is not None:
        accelerator = Accelerator(cpu=True, strategy=layout)
        model, optimizer = accelerator.prepare(model, optimizer)
        backward = accelerator.backward
        rank = accelerator.process_index
        inputs, targets = (each.chunk(accelerator.num_processes)[rank] for each in (inputs, targets))
        if load:
            accelerator.load_state(load)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        backward(loss)
        return loss.detach()

    for number in range(2 if load else 0, 4):
        if save and number == 2:
            accelerator.save_state(save, blocking=True)
        optimizer.step(closure)
    full = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    return torch.cat([each.detach().flatten() for each in full])


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_lbfgs_decides_by_the_loss_of_all_ranks(layout: str, line_search: str | None) -> None:
    expected = minimize(None, line_search)
    for weights in run_ranks(minimize, 2, layout, line_search, timeout=60):
        assert torch.allclose(weights, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("saved", "loaded", "num_ranks"), [("fsdp", "fsdp", 2), ("ddp", "hsdp=2", 4), ("fsdp", "ddp", 2)]
)
def test_lbfgs_resumes_from_any_layout(saved: str, loaded: str, num_ranks: int, tmp_path: Path) -> None:
    expected = minimize(None, "strong_wolfe")
    for weights in run_ranks(minimize, 2, saved, "strong_wolfe", str(tmp_path / "saved"), timeout=60):
        assert torch.allclose(weights, expected, rtol=0, atol=1e-8)
    for weights in run_ranks(minimize, num_ranks, loaded, "strong_wolfe", "", str(tmp_path / "saved"), timeout=60):
        assert torch.allclose(weights, expected, rtol=0, atol=1e-8)


def minimize_rows(rank: int, is_local_sgd: bool) -> torch.Tensor:
    """Return the weights after three LBFGS updates on the rows of one rank, by hand or in a block of local SGD."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).double()
    optimizer: Any = optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    targets = (inputs.sum(1, keepdim=True) * (1 + rank)).sin()
    backward: Any = torch.Tensor.backward
    block: Any = nullcontext()
    if is_local_sgd:
        accelerator = Accelerator(cpu=True, strategy="ddp")
        model, optimizer = accelerator.prepare(model, optimizer)
        backward = accelerator.backward
        block = LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=100)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        backward(loss)
        return loss.detach()

    with block as local_sgd:
        for _ in range(3):
            optimizer.step(closure)
            if local_sgd is not None:
                local_sgd.step()
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def minimize_locally() -> torch.Tensor:
    return minimize_rows(int(os.environ["RANK"]), is_local_sgd=True)


def test_lbfgs_decides_by_each_ranks_own_loss_under_local_sgd() -> None:
    expected = (minimize_rows(0, False) + minimize_rows(1, False)) / 2
    for weights in run_ranks(minimize_locally, 2, timeout=60):
        assert torch.allclose(weights, expected, rtol=0, atol=1e-12)
