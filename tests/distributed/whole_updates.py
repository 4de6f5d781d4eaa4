"""Loops with optimizers that read whole matrices: by hand on one process, and prepared under any layout."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

from headway import Accelerator, MatrixOptimizer, TensorParallelOptions
from headway.layouts.whole_updates import ownership
from tests.distributed.layouts import GPT, seeded, text

UPDATES = 20
Make = Callable[[nn.Module], list[optim.Optimizer]]


class Mixed(nn.Module):
    """A convolution, a batch of matrices as fused experts are, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 12)
        self.convolution = nn.Conv2d(1, 6, 3, padding=1)
        self.experts = nn.Parameter(torch.randn(3, 12, 10) * 0.3)
        self.out = nn.Linear(10, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        x = x + self.convolution(x[:, None]).mean(1)
        whole: torch.Tensor = self.out(torch.einsum("btd,edo->bto", x, self.experts).tanh())
        return whole


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": GPT,
    "mixed": Mixed,
}


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    every = list(model.parameters())
    return [p for p in every if p.ndim >= 2], [p for p in every if p.ndim < 2]


def muon(model: nn.Module) -> list[optim.Optimizer]:
    matrices, rest = split(model)
    return [optim.Muon(matrices, lr=0.02, weight_decay=0.1), optim.AdamW(rest, lr=0.01)]


def muon_of_views(model: nn.Module) -> list[optim.Optimizer]:
    matrices, rest = split(model)
    return [MatrixOptimizer(matrices, partial(optim.Muon, lr=0.02)), optim.AdamW(rest, lr=0.01)]


def adafactor(model: nn.Module) -> list[optim.Optimizer]:
    """In three groups. Some ranks own nothing of the second, which has one parameter."""
    matrices, rest = split(model)
    groups = [{"params": matrices}, {"params": rest[:1], "lr": 0.005}, {"params": rest[1:]}]
    return [optim.Adafactor(groups, lr=0.02)]


def adafactor_of_transformers(model: nn.Module) -> list[optim.Optimizer]:
    from transformers import Adafactor

    return [Adafactor(list(model.parameters()))]


def of_package(name: str, **options: Any) -> Make:
    def make(model: nn.Module) -> list[optim.Optimizer]:
        import pytorch_optimizer

        return [getattr(pytorch_optimizer, name)(list(model.parameters()), **options)]

    return make


PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
MAKERS: dict[str, Make] = {
    "Muon": muon,
    "MatrixOptimizer": muon_of_views,
    "Adafactor": adafactor,
    "transformers' Adafactor": adafactor_of_transformers,
    "Rprop": lambda model: [optim.Rprop(list(model.parameters()), lr=0.001)],
    "SOAP": of_package("SOAP", lr=0.01),
    "Shampoo": of_package("Shampoo", lr=0.01),
    "Prodigy": of_package("Prodigy", lr=1.0),
    "Adan": of_package("Adan", lr=0.01),
    "Lamb": of_package("Lamb", lr=0.01),
}
TOLERANCES = {"Muon": 2e-3, "MatrixOptimizer": 2e-3, "transformers' Adafactor": 2e-4, "SOAP": 3e-2}
"""Relative tolerances of losses. Others: 1e-5.

Muon multiplies matrices in bfloat16. SOAP decomposes matrices whose eigenvalues are close to each other: on one
process, a relative change of its gradients by 1e-7 changes losses by 5e-3 after five updates.
"""


def compute_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(ids).square().mean()
    return loss


def decay(optimizers: Sequence[optim.Optimizer], number: int) -> None:
    """Change the learning rates in mid-run, as a schedule does."""
    for optimizer in optimizers if number % 4 == 3 else ():
        for group in optimizer.param_groups:
            if group["lr"] is not None:
                group["lr"] *= 0.8


def run_by_hand(names: Sequence[str], model_name: str) -> dict[str, list[float]]:
    found = {}
    for name in names:
        model = seeded(0, MODELS[model_name])
        optimizers = MAKERS[name](model)
        found[name] = []
        for number in range(UPDATES):
            loss = compute_loss(model, text(number))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            decay(optimizers, number)
            found[name].append(loss.item())
        found[name].append(compute_loss(model, text()).item())
    return found


def run_prepared(layout: str, names: Sequence[str], model_name: str, save: str = "", load: str = "") -> dict[str, Any]:
    """Losses by optimizer. Saved before the tenth update, or loaded to continue from there."""
    ownership.BUCKET_BYTES = 3000  # several buckets, also of a small model
    found: dict[str, Any] = {}
    for name in names:
        handlers = [TensorParallelOptions(plan=PLAN, keep=("blocks.*.heads",))] if "tp" in layout else []
        accelerator = Accelerator(cpu=True, strategy=layout, gradient_accumulation_steps=2, kwargs_handlers=handlers)
        model = seeded(0, MODELS[model_name])
        optimizers = MAKERS[name](model)
        model, *optimizers = accelerator.prepare(model, *optimizers)
        if load:
            accelerator.load_state(str(Path(load, name)))
        losses = []
        for number in range(10 if load else 0, UPDATES):
            if save and number == 10:
                accelerator.save_state(str(Path(save, name)), blocking=True)
            for row in text(number).split(1):
                with accelerator.accumulate(model):
                    loss = compute_loss(model, row)
                    accelerator.backward(loss)
                    losses.append(loss.item())
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
            decay(optimizers, number)
        pairs = zip(losses[::2], losses[1::2])
        found[name] = [*((a + b) / 2 for a, b in pairs), compute_loss(model, text()).item()]
        accelerator.free_memory()
    return found
