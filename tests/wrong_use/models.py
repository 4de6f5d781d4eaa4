"""Mistakes with the model."""

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from tests.wrong_use.losses import train_with_loss
from tests.wrong_use.row import EQUAL, Section, error, plain_error, warning
from tests.wrong_use.script import Script, by_hand_loop, net, sgd, train, windows

section = Section("The model")
row = section.row


# -------------------------------------------------------------------- how the model is called


OUTSIDE = plain_error("Call the model itself, not model.forward() or a part of it")


@row("`model.forward(x)` instead of `model(x)`", EQUAL, fsdp=OUTSIDE)
def forward(s: Script) -> None:
    train_with_loss(s, lambda a, model, x, y: mse_loss(model.forward(x), y))


@row("the model's submodules called one by one", EQUAL, fsdp=OUTSIDE)
def submodules(s: Script) -> None:
    train_with_loss(s, lambda a, model, x, y: mse_loss(model.down(torch.tanh(model.up(x))), y))


@row("the object that was passed to `prepare` called", EQUAL)
def the_original(s: Script) -> None:
    accelerator = s.start()
    original, optimizer, loader = s.build(accelerator)
    model, optimizer, loader = accelerator.prepare(original, optimizer, loader)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(original(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


@row("`accelerator.unwrap_model(model)` called in training", EQUAL)
def unwrapped(s: Script) -> None:
    train_with_loss(s, lambda a, model, x, y: mse_loss(a.unwrap_model(model)(x), y))


@row("`torch.compile(model)` after prepare", EQUAL)
def compiled_after(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    compiled = torch.compile(model, backend="eager")
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(compiled(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


@row("`torch.compile(model)` before prepare", EQUAL)
def compiled_before(s: Script) -> None:
    accelerator = s.start()
    model, optimizer, loader = s.build(accelerator)
    if s.layout == "tp":  # torch.compile(model) would change the module names in the plan
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    train(accelerator, *accelerator.prepare(model, optimizer, loader))


@row("`torch.utils.checkpoint` within the loop", EQUAL)
def checkpointed(s: Script) -> None:
    train_with_loss(s, lambda a, model, x, y: mse_loss(checkpoint(model, x, use_reentrant=False), y))


# -------------------------------------------------------------------- changes after prepare


@row("`model.to(device)` after prepare", EQUAL)
def moved(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    train(accelerator, model.to(accelerator.device), optimizer, loader)


def train_in_double(s: Script) -> nn.Module:
    model = net().double()
    optimizer = sgd(model)
    for inputs, targets in windows():
        mse_loss(model(inputs.double()), targets.double()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@row("`model.double()` after prepare", error("dtype"), single=EQUAL, tp=EQUAL, by_hand=train_in_double)
def other_dtype(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    model.double()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs.double()), targets.double()))
            optimizer.step()
            optimizer.zero_grad()


@row("no `model.train()` after `model.eval()`", EQUAL)
def left_in_eval(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    model.eval()
    train(accelerator, model, optimizer, loader)


def train_part_frozen(s: Script) -> nn.Module:
    model = net()
    model.up.requires_grad_(False)
    return train_per_window(model)


def train_per_window(model: nn.Module) -> nn.Module:
    optimizer = sgd(model)
    for inputs, targets in windows():
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@row("parameters frozen after `prepare`", EQUAL, ddp=error("frozen after prepare()"), by_hand=train_part_frozen)
def frozen_after(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    model.up.requires_grad_(False)
    train(accelerator, model, optimizer, loader)


@row("parameters unfrozen after `prepare`", EQUAL, ddp=error("unfrozen after prepare()"))
def unfrozen_after(s: Script) -> None:
    accelerator = s.start()
    model, optimizer, loader = s.build(accelerator)
    model.up.requires_grad_(False)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.up.requires_grad_(True)
    train(accelerator, model, optimizer, loader)


def train_from_constant(s: Script) -> nn.Module:
    model = net()
    nn.init.constant_(model.up.weight, 0.1)
    return train_per_window(model)


@row("weights set with `torch.nn.init` after `prepare`, equal on all ranks", EQUAL, by_hand=train_from_constant)
def initialized_after(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    nn.init.constant_(model.up.weight, 0.1)
    train(accelerator, model, optimizer, loader)


RANDOM = warning("DTensor random operators")


@row(
    "weights drawn after `prepare`, with a different seed on each rank",
    single=None,
    ddp=error("rank"),
    fsdp=RANDOM,
    tp=RANDOM,
)
def drawn_after(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    torch.manual_seed(accelerator.process_index)
    nn.init.normal_(model.up.weight)
    train(accelerator, model, optimizer, loader)


SHARD_CHANGED = error("changed in place on some ranks alone")


@row("a parameter changed on one rank", single=None, ddp=error("rank"), fsdp=SHARD_CHANGED, tp=SHARD_CHANGED)
def changed_on_one(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    if accelerator.process_index == 1:
        with torch.no_grad():
            model.up.weight.mul_(2)
    train(accelerator, model, optimizer, loader)


REPLACED = error("which changes nothing in a sharded parameter")


@row("`p.data = tensor` after prepare", EQUAL, fsdp=REPLACED, tp=REPLACED, by_hand=train_from_constant)
def data_replaced(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    model.up.weight.data = torch.full_like(model.up.weight, 0.1)
    train(accelerator, model, optimizer, loader)


@by_hand_loop
def train_clamped(model: nn.Module, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    mse_loss(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    for p in model.parameters():
        p.data.clamp_(-0.2, 0.2)


@row("weights clamped in place after each update", EQUAL, by_hand=train_clamped)
def clamped(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                for p in model.parameters():
                    p.data.clamp_(-0.2, 0.2)


def train_with_halved_gradient(s: Script) -> nn.Module:
    model = net()
    model.up.weight.register_hook(lambda grad: grad / 2)
    return train_per_window(model)


HOOKED = error("register_post_accumulate_grad_hook")


@row(
    "a hook on a parameter's gradient, registered before `prepare`",
    EQUAL,
    fsdp=HOOKED,
    tp=HOOKED,
    by_hand=train_with_halved_gradient,
)
def hook_before(s: Script) -> None:
    accelerator = s.start()
    model, optimizer, loader = s.build(accelerator)
    model.up.weight.register_hook(lambda grad: grad / 2)
    train(accelerator, *accelerator.prepare(model, optimizer, loader))


@row(
    "a hook on a parameter's gradient, registered after `prepare`",
    EQUAL,
    fsdp=HOOKED,
    by_hand=train_with_halved_gradient,
)
def hook_after(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    model.up.weight.register_hook(lambda grad: grad / 2)
    train(accelerator, model, optimizer, loader)


# -------------------------------------------------------------------- gradients read by hand


def compute_norms(_: Script) -> list[torch.Tensor]:
    model = net()
    optimizer = sgd(model)
    found = []
    for inputs, targets in windows():
        mse_loss(model(inputs), targets).backward()
        found.append(sum(p.grad.pow(2).sum() for p in model.parameters()).sqrt())
        optimizer.step()
        optimizer.zero_grad()
    return found


@row("a norm that the script computes from `p.grad` at the window's end", EQUAL, by_hand=compute_norms)
def norm_by_hand(s: Script) -> Any:
    accelerator, model, optimizer, loader = s.prepare_all()
    found = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            if accelerator.sync_gradients:
                found.append(sum(p.grad.pow(2).sum().item() for p in model.parameters()) ** 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return found


# -------------------------------------------------------------------- parts of the model


class WithNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.norm(self.up(x))))  # type: ignore[no-any-return]


def train_with_batch_norm(s: Script) -> list[torch.Tensor]:
    """Train with BatchNorm in plain PyTorch.

    Each rank's part of a micro-batch is normalized by its own statistics, as in DistributedDataParallel. Rank 0's
    buffers are kept.
    """
    model = net(WithNorm)
    optimizer = sgd(model)
    for inputs, targets in windows():
        for x, y in zip(inputs.split(4), targets.split(4)):
            buffers = copy.deepcopy(dict(model.named_buffers()))
            for shard, (a, b) in enumerate(zip(x.chunk(s.shards), y.chunk(s.shards))):
                (mse_loss(model(a), b) / 2 / s.shards).backward()
                if shard == 0:
                    mine = copy.deepcopy(dict(model.named_buffers()))
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])
            for name, buffer in model.named_buffers():
                buffer.copy_(mine[name])
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@row(
    "BatchNorm with each rank's own statistics, as in `DistributedDataParallel`",
    EQUAL,
    tp=None,
    by_hand=train_with_batch_norm,
)
def batch_norm(s: Script) -> Any:
    accelerator = s.start()
    model = net(WithNorm)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), s.loader(accelerator))
    train(accelerator, model, optimizer, loader)
    return list(model.parameters())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.down.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.down(torch.tanh(self.up(x))))  # type: ignore[no-any-return]


@row("tied weights", EQUAL, tp=None, by_hand=lambda s: train_per_window(net(Tied)))
def tied(s: Script) -> None:
    accelerator = s.start()
    s.model = model = net(Tied)
    train(accelerator, *accelerator.prepare(model, sgd(model), s.loader(accelerator)))
    s.model = model


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.spare = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, is_spared: bool = False) -> torch.Tensor:
        last = self.spare if is_spared else self.down
        return last(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


@row("a layer that no loss uses", EQUAL, ddp=error("spare.weight"), by_hand=lambda s: train_per_window(net(Unused)))
def unused(s: Script) -> None:
    accelerator = s.start()
    loader = s.loader(accelerator)
    s.model = model = net(Unused)
    train(accelerator, *accelerator.prepare(model, sgd(model), loader))


def train_alternating_layers(_: Script) -> nn.Module:
    model = net(Unused)
    optimizer = sgd(model)
    for inputs, targets in windows():
        for number, (x, y) in enumerate(zip(inputs.split(2), targets.split(2))):
            is_spared = number % 2 == 1  # rows of rank 1
            (mse_loss(model(x, is_spared), y) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@row(
    "a layer that one rank's loss does not use",
    error("took no part"),
    single=None,
    fsdp=EQUAL,
    tp=None,
    by_hand=train_alternating_layers,
)
def unused_on_one(s: Script) -> None:
    accelerator = s.start()
    loader = s.loader(accelerator)
    s.model = model = net(Unused)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), loader)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs, is_spared=bool(accelerator.process_index)), targets))
            optimizer.step()
            optimizer.zero_grad()


@row("models of different shapes on the ranks", error("ranks have built different models"), single=None)
def different_shapes(s: Script) -> None:
    accelerator = s.start()
    _, _, loader = s.build(accelerator)
    model = net()
    if accelerator.process_index:
        model.up, model.down = nn.Linear(4, 16), nn.Linear(16, 2)
    train(accelerator, *accelerator.prepare(model, sgd(model), loader))


# -------------------------------------------------------------------- copies and averages


def compute_average(_: Script) -> nn.Module:
    model, shadow = net(), net()
    optimizer = sgd(model)
    for inputs, targets in windows():
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, p in zip(shadow.parameters(), model.parameters()):
                mean.lerp_(p, 0.1)
    return shadow


COPIED = error("cannot be copied or pickled")


@row("averaged weights in a deepcopy of the prepared model", EQUAL, fsdp=COPIED, tp=COPIED, by_hand=compute_average)
def average(s: Script) -> Any:
    accelerator, model, optimizer, loader = s.prepare_all()
    shadow = copy.deepcopy(model)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                with torch.no_grad():
                    for mean, p in zip(shadow.parameters(), model.parameters()):
                        mean.lerp_(p, 0.1)
    return shadow


SHARDED = plain_error("take p.full_tensor() on all ranks")


@row("averaged weights in a deepcopy made before `prepare`", EQUAL, fsdp=SHARDED, tp=SHARDED, by_hand=compute_average)
def average_of_a_plain_copy(s: Script) -> Any:
    accelerator = s.start()
    parts = s.build(accelerator)
    shadow = copy.deepcopy(parts[0])
    model, optimizer, loader = accelerator.prepare(*parts)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                with torch.no_grad():
                    for mean, p in zip(shadow.parameters(), model.parameters()):
                        mean.lerp_(p, 0.1)
    return shadow
