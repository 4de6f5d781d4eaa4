"""Mistakes in saving and loading."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from headway import load_checkpoint_in_model
from tests.wrong_use.row import EQUAL, Section, error, warning
from tests.wrong_use.script import Script, net, train, windows

section = Section("Saving and loading")
row = section.row

LONE = error("on rank 0 only")
"""Expected error if each rank has a shard of the model."""


def load_weights(s: Script, file: str) -> nn.Module:
    """Load a file of plain weights, on each rank by itself."""
    model = net()
    model.load_state_dict(torch.load(s.folder / file, weights_only=True))
    return model


@row("`accelerator.save_model` under `if accelerator.is_main_process:`", EQUAL, fsdp=LONE, tp=LONE)
def save_model_alone(s: Script) -> Any:
    accelerator, model, optimizer, loader = s.prepare_all()
    train(accelerator, model, optimizer, loader)
    if accelerator.is_main_process:
        accelerator.save_model(model, s.folder)
    accelerator.wait_for_everyone()
    saved = net()
    load_checkpoint_in_model(saved, s.folder / "model.safetensors")
    return saved


@row(
    "`accelerator.save_state` under `if accelerator.is_main_process:`",
    LONE,
    single=EQUAL,
    ddp=warning("RNG states of the other ranks"),
)
def save_state_alone(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    if accelerator.is_main_process:
        accelerator.save_state(s.folder / "state")
    accelerator.wait_for_everyone()
    accelerator.load_state(s.folder / "state")
    train(accelerator, model, optimizer, loader)


@row("`torch.save(model.state_dict())` under `if accelerator.is_main_process:`", EQUAL, fsdp=LONE, tp=LONE)
def torch_save_alone(s: Script) -> Any:
    accelerator, model, optimizer, loader = s.prepare_all()
    train(accelerator, model, optimizer, loader)
    if accelerator.is_main_process:
        torch.save(model.state_dict(), s.folder / "model.pt")
    accelerator.wait_for_everyone()
    return load_weights(s, "model.pt")


PARTS = warning("has this rank's shard of each tensor")


@row("`state = model.state_dict()` on all ranks, saved by one", EQUAL, fsdp=PARTS, tp=PARTS)
def torch_save_of_parts(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    state = model.state_dict()
    if accelerator.is_main_process:
        torch.save(state, s.folder / "model.pt")
    train(accelerator, model, optimizer, loader)


@row("`accelerator.get_state_dict` under `if accelerator.is_main_process:`", EQUAL, fsdp=LONE, tp=LONE)
def get_state_dict_alone(s: Script) -> Any:
    accelerator, model, optimizer, loader = s.prepare_all()
    train(accelerator, model, optimizer, loader)
    if accelerator.is_main_process:
        accelerator.save(accelerator.get_state_dict(model), s.folder / "model.pt")
    accelerator.wait_for_everyone()
    return load_weights(s, "model.pt")


@row("`torch.save(optimizer.state_dict())` under `if accelerator.is_main_process:`", EQUAL, fsdp=LONE, tp=LONE)
def optimizer_saved_alone(s: Script) -> Any:
    accelerator, model, optimizer, loader = s.prepare_all()
    train(accelerator, model, optimizer, loader)
    if accelerator.is_main_process:
        torch.save(optimizer.state_dict(), s.folder / "optimizer.pt")
    accelerator.wait_for_everyone()
    optimizer.load_state_dict(torch.load(s.folder / "optimizer.pt", weights_only=True))


@row("`model.load_state_dict` under `if accelerator.is_main_process:`", error("rank"), single=EQUAL, fsdp=LONE, tp=LONE)
def load_alone(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    if accelerator.is_main_process:
        model.load_state_dict(net(seed=s.shards - 1).state_dict())
    train(accelerator, model, optimizer, loader)


@row("plain weights loaded into the prepared model", EQUAL)
def load_after_prepare(s: Script) -> None:
    accelerator = s.start()
    parts = s.build(accelerator)
    nn.init.zeros_(parts[0].up.weight)
    model, optimizer, loader = accelerator.prepare(*parts)
    model.load_state_dict(net().state_dict())
    train(accelerator, model, optimizer, loader)


@row("`load_state` before prepare", error("prepare"))
def load_state_before_prepare(s: Script) -> None:
    accelerator, *_ = s.prepare_all()
    accelerator.save_state(s.folder / "state")
    accelerator = s.start()
    accelerator.load_state(s.folder / "state")
    train(accelerator, *accelerator.prepare(*s.build(accelerator)))


@row("`load_state` under `if accelerator.is_main_process:`", error("load_state is called"), single=EQUAL)
def load_state_alone(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    accelerator.save_state(s.folder / "state")
    if accelerator.is_main_process:
        accelerator.load_state(s.folder / "state")
    train(accelerator, model, optimizer, loader)


@row("`save_state` in the middle of a window", warning("in the middle of a window"))
def save_in_a_window(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for index, (inputs, targets) in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward((model(inputs) - targets).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if index == 2:
            accelerator.save_state(s.folder / "state")


@row("`save_state()` without a folder, and without automatic naming", error("needs a folder"))
def save_without_a_folder(s: Script) -> None:
    accelerator, *_ = s.prepare_all()
    accelerator.save_state()


@row("a folder without a checkpoint passed to `load_state`", error("no manifest.json"))
def load_nothing(s: Script) -> None:
    accelerator, *_ = s.prepare_all()
    accelerator.load_state(s.folder)


@row("another model's checkpoint", error("does not fit"))
def load_another(s: Script) -> None:
    accelerator, *_ = s.prepare_all()
    accelerator.save_state(s.folder / "state")
    accelerator = s.start()
    model = net()
    model.down = nn.Linear(8, 3)
    accelerator.prepare(model)
    accelerator.load_state(s.folder / "state")


@row("an object without `state_dict` registered for checkpointing", error("state_dict"))
def register_anything(s: Script) -> None:
    accelerator, *_ = s.prepare_all()
    accelerator.register_for_checkpointing({"epoch": 1})


PART = error("cannot be copied or pickled")


@row("`copy.deepcopy` of the prepared model, or `torch.save(model)`", EQUAL, fsdp=PART, tp=PART)
def pickled(s: Script) -> Any:
    accelerator, model, optimizer, loader = s.prepare_all()
    train(accelerator, model, optimizer, loader)
    torch.save(model, s.folder / f"model{accelerator.process_index}.pt")
    return torch.load(s.folder / f"model{accelerator.process_index}.pt", weights_only=False)


def resume_with_groups(s: Script, groups: Callable[[nn.Module], Any], **options: Any) -> None:
    """Save after one epoch with two parameter groups, resume with other groups, and train one more epoch."""
    accelerator = s.start()
    for is_resumed, make in enumerate((make_groups_by_layer, groups)):
        s.model = net()
        optimizer = torch.optim.SGD(make(s.model), lr=0.1, momentum=0.9)
        model, prepared, loader = accelerator.prepare(s.model, optimizer, s.loader(accelerator))
        if is_resumed:
            accelerator.load_state(s.folder / "state", **options)
        train(accelerator, model, prepared, loader)
        if not is_resumed:
            accelerator.save_state(s.folder / "state")
            accelerator.free_memory()


def make_groups_by_layer(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.up.parameters()), "lr": 0.05}, {"params": list(model.down.parameters())}]


def train_for_two_epochs(s: Script) -> nn.Module:
    model = net()
    optimizer = torch.optim.SGD(make_groups_by_layer(model), lr=0.1, momentum=0.9)
    for inputs, targets in [*windows(), *windows()]:
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@row("a resume with the parameter groups in another order", EQUAL, by_hand=train_for_two_epochs)
def groups_in_another_order(s: Script) -> None:
    resume_with_groups(s, lambda model: make_groups_by_layer(model)[::-1])


@row("a resume with other parameter groups", error("other parameter groups than the saved one"))
def other_groups(s: Script) -> None:
    resume_with_groups(s, lambda model: list(model.parameters()))
