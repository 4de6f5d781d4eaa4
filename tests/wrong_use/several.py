"""Mistakes with several models in one loop."""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel

from tests.wrong_use.row import EQUAL, Section, error, plain_error, warning
from tests.wrong_use.script import Script, make_data, net, sgd, windows

section = Section("Several models")
row = section.row


def prepare_pair(s: Script, **options: Any) -> Any:
    accelerator = s.start(**options)
    loader = s.loader(accelerator)
    one, two = net(seed=0), net(seed=1)
    return accelerator, *accelerator.prepare(one, two, sgd(one), sgd(two), loader)


# -------------------------------------------------------------------- a teacher and a student


def train_student(_: Script) -> nn.Module:
    teacher, student = net(seed=1), net()
    optimizer = sgd(student)
    for inputs, _targets in windows():
        mse_loss(student(inputs), teacher(inputs).detach()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return student


@row("a teacher that is not prepared", EQUAL, by_hand=train_student)
def teacher(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    teacher = net(seed=1)
    for inputs, _ in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), teacher(inputs).detach()))
            optimizer.step()
            optimizer.zero_grad()


@row("a teacher that is prepared and not trained", EQUAL, by_hand=train_student)
def prepared_teacher(s: Script) -> Any:
    accelerator = s.start()
    model, optimizer, loader = s.build(accelerator)
    model, optimizer, loader, teacher = accelerator.prepare(model, optimizer, loader, net(seed=1).requires_grad_(False))
    for inputs, _ in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), teacher(inputs).detach()))
            optimizer.step()
            optimizer.zero_grad()


# -------------------------------------------------------------------- a generator and a critic


def train_gan(_: Script) -> list[nn.Module]:
    return train_gan_by_hand(4)


def train_gan_on_whole_windows(_: Script) -> list[nn.Module]:
    return train_gan_by_hand(8)


def train_gan_by_hand(size: int) -> list[nn.Module]:
    """Train a GAN in plain PyTorch.

    D learns that data is 1 and G's output is 0; G learns to make D output 1. Each update has 8 rows, in parts of `size`
    rows.
    """
    g, d = net(seed=0), net(seed=1)
    opt_g, opt_d = sgd(g), sgd(d)
    for inputs, _targets in windows():
        share = size / len(inputs)
        for part in inputs.split(size):
            ones = torch.ones(len(part), 2)
            fake = generate_fakes(g, part)
            is_last = part.data_ptr() == inputs[-size:].data_ptr()
            ((mse_loss(d(part), ones) + d(fake.detach()).square().mean()) * share).backward()
            if is_last:
                opt_d.step()
                opt_d.zero_grad()
            d.requires_grad_(False)  # G's loss must add no gradients to D
            (mse_loss(d(fake), ones) * share).backward()
            d.requires_grad_(True)
            if is_last:
                opt_g.step()
                opt_g.zero_grad()
    return [g, d]


def generate_fakes(g: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return torch.cat([g(inputs), inputs[:, :2]], 1)


@row("a GAN with an `accumulate` block for each model", EQUAL, by_hand=train_gan)
def gan(s: Script) -> Any:
    accelerator, g, d, opt_g, opt_d, loader = prepare_pair(s)
    for inputs, _ in loader:
        ones = torch.ones(len(inputs), 2)
        fake = generate_fakes(g, inputs)
        with accelerator.accumulate(d):
            opt_d.zero_grad()
            accelerator.backward(mse_loss(d(inputs), ones) + d(fake.detach()).square().mean())
            opt_d.step()
        with accelerator.accumulate(g):
            opt_g.zero_grad()
            accelerator.backward(mse_loss(d(fake), ones))
            opt_g.step()
    return [g, d]


@row("a GAN in one block, D's backward and step before G's", error("block"))
def gan_in_one_block(s: Script) -> Any:
    accelerator, g, d, opt_g, opt_d, loader = prepare_pair(s)
    for inputs, _ in loader:
        ones = torch.ones(len(inputs), 2)
        with accelerator.accumulate(g, d):
            fake = generate_fakes(g, inputs)
            opt_d.zero_grad()
            accelerator.backward(mse_loss(d(inputs), ones) + d(fake.detach()).square().mean())
            opt_d.step()
            opt_g.zero_grad()
            accelerator.backward(mse_loss(d(fake), ones))
            opt_g.step()
    return [g, d]


@row("a GAN in two blocks that name no model, or both models", warning("a block of its own"))
def gan_in_blocks_for_both(s: Script) -> Any:
    accelerator, g, d, opt_g, opt_d, loader = prepare_pair(s)
    for inputs, _ in loader:
        ones = torch.ones(len(inputs), 2)
        fake = generate_fakes(g, inputs)
        with accelerator.accumulate():
            accelerator.backward(mse_loss(d(inputs), ones) + d(fake.detach()).square().mean())
            opt_d.step()
            opt_d.zero_grad()
        with accelerator.accumulate():
            accelerator.backward(mse_loss(d(fake), ones))
            opt_g.step()
            opt_g.zero_grad()
    return [g, d]


@row("a GAN in one block, one batch per update", EQUAL, by_hand=train_gan_on_whole_windows)
def gan_in_one_block_without_windows(s: Script) -> Any:
    accelerator, g, d, opt_g, opt_d, loader = prepare_pair(s, steps=1)
    for inputs, _ in loader:
        ones = torch.ones(len(inputs), 2)
        with accelerator.accumulate(g, d):
            fake = generate_fakes(g, inputs)
            opt_d.zero_grad()
            accelerator.backward(mse_loss(d(inputs), ones) + d(fake.detach()).square().mean())
            opt_d.step()
            opt_g.zero_grad()
            accelerator.backward(mse_loss(d(fake), ones))
            opt_g.step()
    return [g, d]


@row(
    "two models trained together, of which one is not prepared",
    warning("a model that is not prepared"),
    single=EQUAL,
    by_hand=lambda s: train_both(s),
)
def one_left_out(s: Script) -> Any:
    accelerator, model, optimizer, loader = s.prepare_all(steps=1)
    critic = nn.Linear(2, 2)
    nn.init.ones_(critic.weight)
    nn.init.zeros_(critic.bias)
    other = torch.optim.SGD(critic.parameters(), lr=0.1)
    for inputs, targets in loader:
        accelerator.backward(mse_loss(critic(model(inputs)), targets))
        optimizer.step()
        other.step()
        optimizer.zero_grad()
        other.zero_grad()
    return [model, critic]


def train_both(_: Script) -> list[nn.Module]:
    model, critic = net(), nn.Linear(2, 2)
    nn.init.ones_(critic.weight)
    nn.init.zeros_(critic.bias)
    optimizer, other = sgd(model), torch.optim.SGD(critic.parameters(), lr=0.1)
    for inputs, targets in windows():
        mse_loss(critic(model(inputs)), targets).backward()
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    return [model, critic]


# -------------------------------------------------------------------- averages


def train_with_swa(_: Script) -> nn.Module:
    model = net()
    shadow = AveragedModel(model)
    optimizer = sgd(model)
    for inputs, targets in windows():
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        shadow.update_parameters(model)
    return shadow.module


@row(
    "`torch.optim.swa_utils.AveragedModel` of the prepared model",
    error("use headway.ExponentialMovingAverage(model)"),
    single=EQUAL,
    ddp=EQUAL,
    by_hand=train_with_swa,
)
def averaged(s: Script) -> Any:
    accelerator, model, optimizer, loader = s.prepare_all()
    shadow = AveragedModel(model)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                shadow.update_parameters(model)
    return shadow.module


@row(
    "`torch.optim.swa_utils.AveragedModel` of the model before prepare",
    plain_error("use headway.ExponentialMovingAverage(model)"),
    single=EQUAL,
    ddp=EQUAL,
    by_hand=train_with_swa,
)
def averaged_before(s: Script) -> Any:
    accelerator = s.start()
    parts = s.build(accelerator)
    shadow = AveragedModel(parts[0])
    model, optimizer, loader = accelerator.prepare(*parts)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                shadow.update_parameters(model)
    return shadow.module


# -------------------------------------------------------------------- second-order optimizers


def train_with_lbfgs(_: Script) -> nn.Module:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    inputs, targets = make_data()

    def compute() -> torch.Tensor:
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    for _step in range(2):
        optimizer.step(compute)
    return model


@row("LBFGS with a closure", EQUAL, by_hand=train_with_lbfgs)
def lbfgs(s: Script) -> None:
    accelerator = s.start(steps=1)
    s.model = model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2))
    inputs, targets = make_data()

    def compute() -> torch.Tensor:
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        return loss

    for _ in range(2):
        optimizer.step(compute)


@row(
    "LBFGS without a closure, in an `accumulate` block",
    plain_error("missing 1 required positional argument: 'closure'"),
)
def lbfgs_without_closure(s: Script) -> None:
    accelerator = s.start()
    loader = s.loader(accelerator)
    s.model = model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
