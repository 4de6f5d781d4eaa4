"""Training with optimizers that need whole matrices, by plain PyTorch on one process and by Headway in any layout."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

from headway import Accelerator, MatrixOptimizer, TensorParallelOptions
from headway.layouts.whole_updates import ownership
from tests.distributed.layouts import GPT, build_seeded, make_tokens

UPDATES = 20
Make = Callable[[nn.Module], list[optim.Optimizer]]


class Mixed(nn.Module):
    """Model with a convolution, a batch of matrices (as in fused experts), and vectors."""

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


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    every = list(model.parameters())
    return [p for p in every if p.ndim >= 2], [p for p in every if p.ndim < 2]


def muon(model: nn.Module) -> list[optim.Optimizer]:
    matrices, rest = split_parameters(model)
    return [optim.Muon(matrices, lr=0.02, weight_decay=0.1), optim.AdamW(rest, lr=0.01)]


def make_matrix_optimizer(model: nn.Module) -> list[optim.Optimizer]:
    matrices, rest = split_parameters(model)
    return [MatrixOptimizer(matrices, partial(optim.Muon, lr=0.02)), optim.AdamW(rest, lr=0.01)]


def adafactor(model: nn.Module) -> list[optim.Optimizer]:
    """Return Adafactor with three groups. The second has one parameter, so some ranks own none of it."""
    matrices, rest = split_parameters(model)
    groups = [{"params": matrices}, {"params": rest[:1], "lr": 0.005}, {"params": rest[1:]}]
    return [optim.Adafactor(groups, lr=0.02)]


def transformers_adafactor(model: nn.Module) -> list[optim.Optimizer]:
    from transformers import Adafactor

    return [Adafactor(list(model.parameters()))]


def make_package_factory(name: str, **options: Any) -> Make:
    def make(model: nn.Module) -> list[optim.Optimizer]:
        import pytorch_optimizer

        return [getattr(pytorch_optimizer, name)(list(model.parameters()), **options)]

    return make


PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
MAKERS: dict[str, Make] = {
    "Muon": muon,
    "MatrixOptimizer": make_matrix_optimizer,
    "Adafactor": adafactor,
    "transformers' Adafactor": transformers_adafactor,
    "Rprop": lambda model: [optim.Rprop(list(model.parameters()), lr=0.001)],
    "SOAP": make_package_factory("SOAP", lr=0.01),
    "Shampoo": make_package_factory("Shampoo", lr=0.01),
    "Prodigy": make_package_factory("Prodigy", lr=1.0),
    "Adan": make_package_factory("Adan", lr=0.01),
    "Lamb": make_package_factory("Lamb", lr=0.01),
}
TOLERANCES = {"Muon": 2e-3, "MatrixOptimizer": 2e-3, "transformers' Adafactor": 2e-4, "SOAP": 3e-2}
"""Relative tolerances of losses. The default is 1e-5.

Muon multiplies matrices in bfloat16. SOAP decomposes matrices whose eigenvalues are close to each other. On one
process, a relative change of its gradients by 1e-7 changes losses by 5e-3 after five updates.
"""


def compute_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(ids).square().mean()
    return loss


def decay_learning_rates(optimizers: Sequence[optim.Optimizer], number: int) -> None:
    """Multiply the learning rates by 0.8 after every fourth update, as a schedule would."""
    for optimizer in optimizers if number % 4 == 3 else ():
        for group in optimizer.param_groups:
            if group["lr"] is not None:
                group["lr"] *= 0.8


def run_by_hand(names: Sequence[str], model_name: str) -> dict[str, list[float]]:
    found = {}
    for name in names:
        model = build_seeded(0, MODELS[model_name])
        optimizers = MAKERS[name](model)
        found[name] = []
        for number in range(UPDATES):
            loss = compute_loss(model, make_tokens(number))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            decay_learning_rates(optimizers, number)
            found[name].append(loss.item())
        found[name].append(compute_loss(model, make_tokens()).item())
    return found


def run_prepared(layout: str, names: Sequence[str], model_name: str, save: str = "", load: str = "") -> dict[str, Any]:
    """Train, and return each optimizer's losses.

    Args:
        layout: Strategy of the Accelerator.
        names: Keys of `MAKERS`.
        model_name: Key of `MODELS`.
        save: Folder of a checkpoint to write before update 10. Default: none.
        load: Folder of a checkpoint to continue from at update 10. Default: none.
    """
    ownership.BUCKET_BYTES = 3000  # several buckets even for a small model
    found: dict[str, Any] = {}
    for name in names:
        handlers = [TensorParallelOptions(plan=PLAN, keep=("blocks.*.heads",))] if "tp" in layout else []
        accelerator = Accelerator(cpu=True, strategy=layout, gradient_accumulation_steps=2, kwargs_handlers=handlers)
        model = build_seeded(0, MODELS[model_name])
        optimizers = MAKERS[name](model)
        model, *optimizers = accelerator.prepare(model, *optimizers)
        if load:
            accelerator.load_state(str(Path(load, name)))
        losses = []
        for number in range(10 if load else 0, UPDATES):
            if save and number == 10:
                accelerator.save_state(str(Path(save, name)), blocking=True)
            for row in make_tokens(number).split(1):
                with accelerator.accumulate(model):
                    loss = compute_loss(model, row)
                    accelerator.backward(loss)
                    losses.append(loss.item())
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
            decay_learning_rates(optimizers, number)
        pairs = zip(losses[::2], losses[1::2])
        found[name] = [*((a + b) / 2 for a, b in pairs), compute_loss(model, make_tokens()).item()]
        accelerator.free_memory()
    return found
