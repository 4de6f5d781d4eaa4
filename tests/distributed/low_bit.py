"""Training with optimizers that store 8-bit and 4-bit states, by plain PyTorch on one process and by Headway in any layout."""

import io
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway import Accelerator, TensorParallelOptions
from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from headway.core.weights.pieces import iterate_inner_tensors
from tests.distributed.layouts import build_seeded

UPDATES, SAVED_AT = 20, 10
PLAN = {"up": "colwise", "down": "rowwise"}


class Even(nn.Module):
    """Model whose shards on two and on four ranks consist of whole quantization blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 512, bias=False), nn.Linear(512, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = self.down(self.up(x).tanh())
        return whole


class Odd(nn.Module):
    """Model whose sizes are divisible neither by the block size nor by the ranks, with a parameter of three values."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 250), nn.Linear(250, 65)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = self.down(self.up(x).tanh()) * self.scale.mean()
        return whole


MODELS: dict[str, Callable[[], nn.Module]] = {"even": Even, "odd": Odd}


def make_torchao_factory(name: str, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        from torchao import optim

        made: torch.optim.Optimizer = getattr(optim, name)(list(model.parameters()), lr=3e-3, **options)
        return made

    return make


def make_bitsandbytes_factory(name: str, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        from bitsandbytes import optim

        made: torch.optim.Optimizer = getattr(optim, name)(list(model.parameters()), **{"lr": 3e-3, **options})
        return made

    return make


MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
    "torchao AdamW8bit": make_torchao_factory("AdamW8bit"),
    "torchao AdamW4bit": make_torchao_factory("AdamW4bit"),
    "torchao AdamWFp8": make_torchao_factory("AdamWFp8"),
    "torchao Adam4bit": make_torchao_factory("Adam4bit", block_size=64),
    "bitsandbytes AdamW8bit": make_bitsandbytes_factory("AdamW8bit"),
    "bitsandbytes PagedAdamW8bit": make_bitsandbytes_factory("PagedAdamW8bit"),
    "bitsandbytes AdamW": make_bitsandbytes_factory("AdamW"),
    "bitsandbytes Lion8bit": make_bitsandbytes_factory("Lion8bit", lr=1e-3),
    "bitsandbytes SGD8bit": make_bitsandbytes_factory("SGD8bit", lr=3e-2, momentum=0.9),
    "bitsandbytes AdEMAMix8bit": make_bitsandbytes_factory("AdEMAMix8bit", alpha=2.0),
}


def compute_loss(model: nn.Module, number: int) -> torch.Tensor:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(number))
    loss: torch.Tensor = (model(x)[:, :64] - x.roll(1, 1)).square().mean()
    return loss


def skip_compiler() -> None:
    """Run torchao's step eagerly in this process. Compiling takes a minute and is not under test."""
    torch.compile = lambda function, **settings: function
    warnings.simplefilter("ignore")


def run_by_hand(names: Sequence[str], model_name: str) -> dict[str, Any]:
    skip_compiler()
    found = {}
    for name in names:
        model = build_seeded(0, MODELS[model_name])
        optimizer = MAKERS[name](model)
        losses = []
        for number in range(UPDATES):
            loss = compute_loss(model, number)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        losses.append(compute_loss(model, 0).item())
        found[name] = {"losses": losses}
    return found


def run_prepared(layout: str, names: Sequence[str], model_name: str, save: str = "", load: str = "") -> dict[str, Any]:
    """Train, and return each optimizer's losses and the bytes of this rank's state.

    Args:
        layout: Strategy of the Accelerator.
        names: Keys of `MAKERS`.
        model_name: Key of `MODELS`.
        save: Folder of a checkpoint to write before update `SAVED_AT`. Default: none.
        load: Folder of a checkpoint to continue from. Default: none.
    """
    skip_compiler()
    found = {}
    for name in names:
        handlers = [TensorParallelOptions(plan=PLAN)] if "tp" in layout else []
        accelerator = Accelerator(cpu=True, strategy=layout, kwargs_handlers=handlers)
        model = build_seeded(0, MODELS[model_name])
        model, optimizer = accelerator.prepare(model, MAKERS[name](model))
        if load:
            accelerator.load_state(str(Path(load, name)))
        losses = []
        for number in range(SAVED_AT if load else 0, UPDATES):
            if save and number == SAVED_AT:
                accelerator.save_state(str(Path(save, name)), blocking=True)
            with accelerator.accumulate(model):
                loss = compute_loss(model, number)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        losses.append(compute_loss(model, 0).item())
        found[name] = {"losses": losses, "bytes": count_bytes(optimizer), "sum": sum_shards(model)}
        accelerator.free_memory()
    return found


def sum_shards(model: nn.Module) -> float:
    return sum(float(get_local_shard(p).detach().double().sum()) for p in model.parameters())


def count_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of this rank's state. A table that several states share counts once."""
    tensors = [
        get_local_shard(value)
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    parts = {id(each.untyped_storage()): each.untyped_storage() for each in iterate_inner_tensors(tensors)}
    return sum(each.nbytes() for each in parts.values())


def run_and_resume(layout: str, names: Sequence[str], model_name: str, folder: str) -> tuple[Any, Any]:
    """Train with a save, and again from the checkpoint in the same layout."""
    return run_prepared(layout, names, model_name, folder), run_prepared(layout, names, model_name, "", folder)


def run_on_one_process(names: Sequence[str], model_name: str, folder: str) -> tuple[Any, Any]:
    """Train by plain PyTorch, and by DDP from the checkpoint of another layout."""
    return run_by_hand(names, model_name), run_prepared("ddp", names, model_name, "", folder)


class Large(nn.Module):
    """Model of a million parameters, whose checkpoint is much larger than the headers of its files."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 8192), nn.Linear(8192, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = self.down(self.up(x).tanh())
        return whole


def count_saved_bytes(layout: str, names: Sequence[str], folder: str) -> dict[str, int]:
    """Make one update of `Large` with each optimizer, save, and return the bytes of all files of each checkpoint."""
    skip_compiler()
    found = {}
    for name in names:
        accelerator = Accelerator(cpu=True, strategy=layout)
        model = Large()
        model, optimizer = accelerator.prepare(model, MAKERS[name](model))
        accelerator.backward(compute_loss(model, 0))
        optimizer.step()
        optimizer.zero_grad()
        saved = Path(folder, name)
        accelerator.save_state(str(saved), blocking=True)
        found[name] = sum(each.stat().st_size for each in saved.rglob("*") if each.is_file())
        accelerator.free_memory()
    return found


def round_with_own_seeds(layout: str) -> list[float]:
    """Return the sum of this rank's shards after each update with stochastic rounding. Each rank has a different RNG state."""
    skip_compiler()
    accelerator = Accelerator(cpu=True, strategy=layout)
    model = build_seeded(0, Even).bfloat16()
    model, optimizer = accelerator.prepare(model, make_torchao_factory("AdamW8bit", bf16_stochastic_round=True)(model))
    torch.manual_seed(accelerator.process_index)
    sums, before = [], torch.get_rng_state()
    for number in range(4):
        with accelerator.accumulate(model):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(number)).bfloat16()
            accelerator.backward(model(x).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
        sums.append(sum_shards(model))
    assert torch.equal(torch.get_rng_state(), before)
    return sums


def override_embedding(layout: str) -> list[torch.dtype]:
    """Return the dtypes of the first moments if one matrix keeps its state in 32 bits."""
    from bitsandbytes.optim import AdamW8bit, GlobalOptimManager

    skip_compiler()
    accelerator = Accelerator(cpu=True, strategy=layout)
    model = build_seeded(0, Even)
    GlobalOptimManager.get_instance().register_module_override(model.up, "weight", {"optim_bits": 32})
    model, optimizer = accelerator.prepare(model, AdamW8bit(model.parameters()))
    with accelerator.accumulate(model):
        accelerator.backward(compute_loss(model, 0))
        optimizer.step()
        optimizer.zero_grad()
    return [optimizer.state[p]["state1"].dtype for p in optimizer.param_groups[0]["params"]]


def load_state_of_one_process(layout: str) -> list[list[float]]:
    """Return losses of plain PyTorch and of Headway after `load_state_dict` of one process's native state, for each optimizer."""
    skip_compiler()
    found = []
    for name in ("torchao AdamW4bit", "bitsandbytes AdamW8bit"):
        model = build_seeded(0, Even)
        plain = MAKERS[name](model)
        for number in range(3):
            compute_loss(model, number).backward()
            plain.step()
            plain.zero_grad()
        copied = build_seeded(0, Even)
        copied.load_state_dict(model.state_dict())
        accelerator = Accelerator(cpu=True, strategy=layout)
        ready, optimizer = accelerator.prepare(copied, MAKERS[name](copied))
        file = io.BytesIO()
        torch.save(plain.state_dict(), file)
        file.seek(0)
        optimizer.load_state_dict(torch.load(file, weights_only=False))
        losses: list[list[float]] = [[], []]
        for number in range(3, 6):
            loss = compute_loss(model, number)
            loss.backward()
            plain.step()
            plain.zero_grad()
            losses[0].append(loss.item())
            with accelerator.accumulate(ready):
                loss = compute_loss(ready, number)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses[1].append(loss.item())
        found += losses
        accelerator.free_memory()
    return found


def load_state_of_other_package(folder: str) -> str:
    """Return the error raised if torchao's AdamW8bit loads a checkpoint of bitsandbytes' AdamW8bit."""
    try:
        run_prepared("ddp", ["bitsandbytes AdamW8bit"], "even", folder)
        Path(folder, "bitsandbytes AdamW8bit").rename(Path(folder, "torchao AdamW8bit"))
        run_prepared("ddp", ["torchao AdamW8bit"], "even", "", folder)
    except Exception as error:
        return str(error)
    return ""
