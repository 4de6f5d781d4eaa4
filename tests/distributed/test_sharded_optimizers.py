"""Optimizers on sharded parameters have the losses of one process, and their states continue in another layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim

from headway import Accelerator
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
