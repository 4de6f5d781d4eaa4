"""Mistakes with number formats."""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from tests.wrong_use.row import EQUAL, Section, error, plain_error
from tests.wrong_use.script import Script, by_hand_loop, sgd, train

section = Section("Number formats")
row = section.row


@by_hand_loop
def train_under_autocast(model: nn.Module, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    for x, y in zip(inputs.split(4), targets.split(4)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(x)
        (mse_loss(outputs.float(), y) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()


@row(
    "`torch.autocast` around a forward that is already under autocast",
    EQUAL,
    ddp=None,
    fsdp=None,
    tp=None,
    by_hand=train_under_autocast,
)
def autocast_twice(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all(mixed_precision="bf16")
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs = model(inputs)
            accelerator.backward(mse_loss(outputs.float(), targets))
            optimizer.step()
            optimizer.zero_grad()


@row("the script's own `GradScaler`, without mixed precision", error("a GradScaler steps SGD"))
def own_scaler(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(scaler.scale(mse_loss(model(inputs), targets)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@row("the script's own `GradScaler`, with `mixed_precision='fp16'`", error("a GradScaler steps SGD"))
def own_scaler_twice(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all(mixed_precision="fp16")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(scaler.scale(mse_loss(model(inputs).float(), targets)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@row(
    "an optimizer that is not prepared, with `mixed_precision='fp16'`",
    error("multiplied by fp16's loss scale"),
    fsdp=error("SGD"),
    tp=error("SGD"),
)
def unprepared_under_fp16(s: Script) -> None:
    accelerator = s.start(steps=1, mixed_precision="fp16")
    model, optimizer, loader = s.build(accelerator)
    model, loader = accelerator.prepare(model, loader)
    train(accelerator, model, optimizer, loader)


@row("`loss.backward()` with `mixed_precision='fp16'`", error("accelerator.backward"))
def backward_under_fp16(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all(mixed_precision="fp16")
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            mse_loss(model(inputs).float(), targets).backward()
            optimizer.step()
            optimizer.zero_grad()


@by_hand_loop
def train_with_clipped_scaled_gradients(
    model: nn.Module, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor
) -> None:
    scaler = torch.amp.GradScaler("cpu")
    for x, y in zip(inputs.split(4), targets.split(4)):
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = model(x)
        scaler.scale(mse_loss(outputs.float(), y) / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@row(
    "`torch.nn.utils.clip_grad_norm_` with `mixed_precision='fp16'`, which clips scaled gradients",
    EQUAL,
    by_hand=train_with_clipped_scaled_gradients,
)
def scaled_gradients(s: Script) -> Any:
    accelerator, model, optimizer, loader = s.prepare_all(mixed_precision="fp16")
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs).float(), targets))
            if accelerator.sync_gradients:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()


@row("a model in half precision, with `mixed_precision='fp16'`", plain_error("Attempting to unscale FP16 gradients"))
def half_model(s: Script) -> None:
    accelerator = s.start(mixed_precision="fp16")
    model, _, loader = s.build(accelerator)
    model.half()
    train(accelerator, *accelerator.prepare(model, sgd(model), loader))


@row(
    "`mixed_precision='nvfp4'` or `'mxfp8'`, for which torchao has only prototypes",
    error("only in prototypes for Blackwell"),
)
def format_without_support(s: Script) -> None:
    s.prepare_all(mixed_precision="nvfp4")
