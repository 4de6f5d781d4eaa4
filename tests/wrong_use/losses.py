"""Mistakes with the loss, and unusual losses."""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from headway import Accelerator
from tests.wrong_use.row import EQUAL, Section, error, plain_error, warning
from tests.wrong_use.script import Script, by_hand_loop

section = Section("The loss")
row = section.row


def train_with_loss(s: Script, compute: Any, **options: Any) -> None:
    """Run the loop with the loss `compute(accelerator, model, inputs, targets)`."""
    accelerator, model, optimizer, loader = s.prepare_all(**options)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(compute(accelerator, model, inputs, targets))
            optimizer.step()
            optimizer.zero_grad()


@row("the script divides the loss by `gradient_accumulation_steps`", warning("divided by 2"))
def divided(s: Script) -> None:
    train_with_loss(s, lambda a, model, x, y: mse_loss(model(x), y) / a.gradient_accumulation_steps)


@row("the script multiplies the loss by the number of processes", warning("multiplied by 2"), single=EQUAL)
def multiplied(s: Script) -> None:
    train_with_loss(s, lambda a, model, x, y: mse_loss(model(x), y) * a.num_processes)


@row("`loss.detach()` given to backward", error("without a graph"))
def detached(s: Script) -> None:
    train_with_loss(s, lambda a, model, x, y: mse_loss(model(x), y).detach())


@row("`loss.item()` given to backward", error("got a float"))
def item(s: Script) -> None:
    train_with_loss(s, lambda a, model, x, y: mse_loss(model(x), y).item())


@row("the mean of gathered losses given to backward", error("without a graph"), single=EQUAL)
def gathered(s: Script) -> None:
    train_with_loss(s, lambda a, model, x, y: a.gather(mse_loss(model(x), y)).mean())


@row("training under `torch.no_grad()`", error("torch.no_grad()"))
def no_grad(s: Script) -> None:
    def compute(a: Accelerator, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return mse_loss(model(x), y)

    train_with_loss(s, compute)


@row("`reduction='none'`", error("reduce it first"))
def unreduced(s: Script) -> None:
    train_with_loss(s, lambda a, model, x, y: mse_loss(model(x), y, reduction="none"))


@row("a tuple of losses", error("got a tuple"))
def several(s: Script) -> None:
    train_with_loss(s, lambda a, model, x, y: (mse_loss(model(x), y), 0.0))


@row("a loss that is nan in the first batch", warning("nan"))
def not_a_number(s: Script) -> None:
    train_with_loss(s, lambda a, model, x, y: mse_loss(model(x), y) * float("nan"))


# -------------------------------------------------------------------- two backwards


@by_hand_loop
def train_with_two_losses(model: nn.Module, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    (mse_loss(model(inputs), targets) + 0.5 * model(inputs).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()


@row("two losses in one micro-batch, each with its own backward", EQUAL, by_hand=train_with_two_losses)
def two_backwards(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            accelerator.backward(0.5 * model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()


@row(
    "two backwards through one graph with `retain_graph=True`, to the same parameters",
    EQUAL,
    by_hand=train_with_two_losses,
)
def retain_graph(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            outputs = model(inputs)
            accelerator.backward(mse_loss(outputs, targets), retain_graph=True)
            accelerator.backward(0.5 * outputs.square().mean())
            optimizer.step()
            optimizer.zero_grad()


@row("two backwards through one graph without `retain_graph=True`", plain_error("Specify retain_graph=True"))
def no_retain_graph(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            outputs = model(inputs)
            accelerator.backward(mse_loss(outputs, targets))
            accelerator.backward(0.5 * outputs.square().mean())
            optimizer.step()
            optimizer.zero_grad()


@by_hand_loop
def train_with_weight_penalty(model: nn.Module, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    mse_loss(model(inputs), targets).backward()
    (0.01 * sum(p.abs().sum() for p in model.parameters())).backward()
    optimizer.step()
    optimizer.zero_grad()


@row("an L1 penalty on the weights, in its own backward", EQUAL, by_hand=train_with_weight_penalty)
def l1_apart(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            accelerator.backward(0.01 * sum(p.abs().sum() for p in model.parameters()))
            optimizer.step()
            optimizer.zero_grad()


@row(
    "an L1 penalty on the weights, added to the loss (under fsdp an error, too, if the model has several units)",
    EQUAL,
    tp=error("call backward separately"),
    by_hand=train_with_weight_penalty,
)
def l1_added(s: Script) -> None:
    train_with_loss(
        s, lambda a, model, x, y: mse_loss(model(x), y) + 0.01 * sum(p.abs().sum() for p in model.parameters())
    )


def compute_gradient_penalty(outputs: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return 0.1 * (slope.norm(dim=1) - 1).square().mean()


@by_hand_loop
def train_with_gradient_penalty(model: nn.Module, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    inputs = inputs.clone().requires_grad_()
    outputs = model(inputs)
    (mse_loss(outputs, targets) + compute_gradient_penalty(outputs, inputs)).backward()
    optimizer.step()
    optimizer.zero_grad()


@row("a gradient penalty: `torch.autograd.grad(..., create_graph=True)`", EQUAL, by_hand=train_with_gradient_penalty)
def gradient_penalty(s: Script) -> None:
    def compute(a: Accelerator, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        outputs = model(x)
        return mse_loss(outputs, y) + compute_gradient_penalty(outputs, x)

    train_with_loss(s, compute)
