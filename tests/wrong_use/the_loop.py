"""Mistakes in the order and form of the loop's lines."""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from tests.wrong_use.row import EQUAL, Section, error, warning
from tests.wrong_use.script import Script, by_hand_loop, net, sgd, train, windows

section = Section("The loop")
row = section.row


@row("no mistake: the documented loop", EQUAL)
def nothing(s: Script) -> None:
    train(*s.prepare_all())


@row("`loss.backward()` instead of `accelerator.backward(loss)`", error("accelerator.backward"))
def loss_backward(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@row("`loss.backward()` instead of `accelerator.backward(loss)`, without `accumulate`", error("accelerator.backward"))
def loss_backward_without_windows(s: Script) -> None:
    _, model, optimizer, loader = s.prepare_all(steps=1)
    for inputs, targets in loader:
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@row("`zero_grad()` before the backward", EQUAL)
def zero_grad_first(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()


@row("`zero_grad()` between the backward and the step", warning("came before step()"))
def zero_grad_between(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.zero_grad()
            optimizer.step()


@row(
    "`model.zero_grad()` instead of `optimizer.zero_grad()`",
    error("cleared between two of its micro-batches"),
    fsdp=EQUAL,
)
def model_zero_grad(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            model.zero_grad()


@by_hand_loop
def train_without_zero_grad(model: nn.Module, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    mse_loss(model(inputs), targets).backward()
    optimizer.step()


@row("no `zero_grad()`, so gradients add up over updates, as in PyTorch", EQUAL, by_hand=train_without_zero_grad)
def no_zero_grad(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()


@row("the step after the `accumulate` block", EQUAL)
def step_outside(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()


@row(
    "no `accumulate` block, though `gradient_accumulation_steps=2`",
    warning("backward() was called outside accumulate()"),
)
def no_accumulate(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for inputs, targets in loader:
        accelerator.backward(mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()


@row("the backward after the `accumulate` block", warning("backward() was called outside accumulate()"))
def backward_outside(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


@row("`if accelerator.sync_gradients:` around step and zero_grad", EQUAL)
def step_if_sync(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            if accelerator.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()


@row("a step at every second batch that the script counts, inside `accumulate`", EQUAL)
def step_by_count(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for index, (inputs, targets) in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            if (index + 1) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()


@row("a step at every third batch that the script counts, though windows have two", warning("ended without step()"))
def step_by_another_count(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for index, (inputs, targets) in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            if (index + 1) % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()


@row("no step", warning("came before step()"))
def no_step(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.zero_grad()


@by_hand_loop
def train_with_two_steps(model: nn.Module, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    mse_loss(model(inputs), targets).backward()
    optimizer.step()
    optimizer.step()
    optimizer.zero_grad()


@row("two steps for one backward, as in PyTorch", EQUAL, by_hand=train_with_two_steps)
def two_steps(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.step()
            optimizer.zero_grad()


@row("`step()` of the optimizer that was passed to `prepare`", error("stepped inside an accumulation window"))
def step_of_the_original(s: Script) -> None:
    accelerator = s.start()
    model, optimizer, loader = s.build(accelerator)
    model, _, loader = accelerator.prepare(model, optimizer, loader)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


# -------------------------------------------------------------------- clipping


@by_hand_loop
def train_clipped(model: nn.Module, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    mse_loss(model(inputs), targets).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


@row("`torch.nn.utils.clip_grad_norm_` at the window's end", EQUAL, by_hand=train_clipped)
def torch_clips(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            if accelerator.sync_gradients:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()


@row("`accelerator.clip_grad_norm_` at each micro-batch", EQUAL, by_hand=train_clipped)
def clips_each(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()


@row("clipping after the `accumulate` block", EQUAL, by_hand=train_clipped)
def clips_outside(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


@row("clipping parameters that were listed before prepare", EQUAL, by_hand=train_clipped)
def clips_what_was_listed_before(s: Script) -> None:
    accelerator = s.start()
    parts = s.build(accelerator)
    listed = list(parts[0].parameters())
    model, optimizer, loader = accelerator.prepare(*parts)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            accelerator.clip_grad_norm_(listed, 0.1)
            optimizer.step()
            optimizer.zero_grad()


@row("clipping after the step, which has no effect, as in PyTorch", EQUAL)
def clips_after_step(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.zero_grad()


# -------------------------------------------------------------------- which batches


def train_on_second_half(_: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    for inputs, targets in list(windows())[2:]:
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@row("batches skipped with `continue`, on all ranks", EQUAL, by_hand=train_on_second_half)
def continues(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for index, (inputs, targets) in enumerate(loader):
        if index < 4:
            continue
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


def train_across_epochs(_: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    for index, (inputs, targets) in enumerate([*windows(4)][:3] * 2):
        (mse_loss(model(inputs), targets) / 2).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    return model


@row("a `break` in the middle of a window, which continues in the next epoch", EQUAL, by_hand=train_across_epochs)
def breaks(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for _ in range(2):
        for index, (inputs, targets) in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
            if index == 2:
                break


@row("one `accumulate` block around all micro-batches of an update", error("Use a separate block for each batch"))
def window_in_one_block(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    batches = iter(loader)
    for _ in range(4):
        with accelerator.accumulate(model):
            for inputs, targets in (next(batches), next(batches)):
                accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


@row("one `accumulate` block around the whole loop", error("a block of its own"))
def loop_in_one_block(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    with accelerator.accumulate(model):
        for inputs, targets in loader:
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


@row("a closure given to `step()`", EQUAL)
def closure(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all(steps=1)
    for inputs, targets in loader:

        def compute(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
            optimizer.zero_grad()
            loss = mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            return loss

        optimizer.step(compute)
