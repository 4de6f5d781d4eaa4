"""Training programs with typical parameter groups, each run by plain PyTorch and by the Accelerator."""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.data import DataLoader

from tests.distributed.cut_models import GPT as TiedGPT
from tests.distributed.cut_models import GPT_PLAN, mixtral

ROWS, WINDOW, STOP, FINDER_UPDATES = 160, 8, 10, 100
"""Samples per epoch, samples per update, updates before the checkpoint, and updates of a learning rate finder."""


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Sequences of nine numbers below 37 whose next number can be learned."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return (index + (1 + index // 37) * torch.arange(9)) % 37


def build_model(kind: str) -> nn.Module:
    """Return a small model in float64: "gpt", or "moe" for a mixture of experts."""
    torch.manual_seed(0)
    return (mixtral() if kind == "moe" else TiedGPT(tied=False)).double()


def compute_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    found = model(ids)
    logits = getattr(found, "logits", found)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


# ---------------------------------------------------------------- groups


def find_layer(name: str) -> int:
    """Return the number of a parameter's block: -1 before the blocks, 2 after them."""
    block = re.search(r"(?:blocks|layers)\.(\d+)\.", name)
    if block:
        return int(block[1])
    return -1 if re.search("tokens|places", name) else 2


def is_in_first_block(name: str) -> bool:
    return find_layer(name) == 0


def should_decay(name: str, parameter: torch.Tensor) -> bool:
    """Whether a parameter gets weight decay. Biases and the weights of norms get none, as is usual."""
    return not name.endswith("bias") and "norm" not in name and "before" not in name


def select_parameters(
    model: nn.Module, chosen: Callable[[str], bool] = lambda name: True
) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad and chosen(name)]


def make_single_group(model: nn.Module) -> list[Optimizer]:
    return [AdamW([p for _, p in select_parameters(model)], lr=0.01, weight_decay=0.1)]


def make_named_group(model: nn.Module) -> list[Optimizer]:
    return [AdamW(select_parameters(model), lr=0.01, weight_decay=0.1)]


def split_by_decay(model: nn.Module) -> list[Optimizer]:
    named = select_parameters(model)
    groups = [
        {"params": [p for name, p in named if should_decay(name, p)], "weight_decay": 0.1},
        {"params": [p for name, p in named if not should_decay(name, p)], "weight_decay": 0.0},
    ]
    return [AdamW(groups, lr=0.01)]


def split_by_decay_reversed(model: nn.Module) -> list[Optimizer]:
    groups = [
        {"params": each["params"][::-1], "weight_decay": each["weight_decay"]}
        for each in reversed(split_by_decay(model)[0].param_groups)
    ]
    return [AdamW(groups, lr=0.01)]


def split_by_layer(model: nn.Module) -> list[Optimizer]:
    """Return AdamW with layer-wise learning rates: each layer's rate is half that of the next layer."""
    groups = [
        {
            "params": [
                p
                for name, p in select_parameters(model)
                if find_layer(name) == layer and should_decay(name, p) == has_decay
            ],
            "lr": 0.01 * 0.5 ** (2 - layer),
            "weight_decay": 0.1 * has_decay / (layer + 2),
            "name": f"layer {layer}",
        }
        for layer in range(-1, 3)
        for has_decay in (True, False)
    ]
    return [AdamW([group for group in groups if group["params"]])]


def omit_first_block(model: nn.Module) -> list[Optimizer]:
    return [AdamW([p for _, p in select_parameters(model, lambda name: not is_in_first_block(name))], lr=0.01)]


def separate_first_block(model: nn.Module) -> list[Optimizer]:
    (optimizer,) = omit_first_block(model)
    add_first_block(model, [optimizer])
    return [optimizer]


def make_two_optimizers(model: nn.Module) -> list[Optimizer]:
    """Return Muon for the matrices in the blocks and AdamW for the rest."""
    matrices = [p for name, p in select_parameters(model) if p.ndim == 2 and 0 <= find_layer(name) < 2]
    chosen = set(map(id, matrices))
    return [
        torch.optim.Muon(matrices, lr=0.02),
        AdamW([p for _, p in select_parameters(model) if id(p) not in chosen], lr=0.01),
    ]


def make_helper_groups(model: nn.Module) -> list[Optimizer]:
    """Return Muon and AdamW with the groups of `headway.parameter_groups`."""
    from headway import parameter_groups

    groups = parameter_groups(model, 0.1, lr=0.01, layer_decay=0.5, overrides={"tokens": {"betas": (0.8, 0.99)}})
    hidden, rest = groups.split_matrices(lr=0.02)
    return [torch.optim.Muon(hidden), AdamW(rest)]


def write_helper_groups(model: nn.Module) -> list[Optimizer]:
    """Return the optimizers of `make_helper_groups`, with groups that are written by hand."""
    named = dict(model.named_parameters())
    matrices, vectors = (
        [
            [p for name, p in named.items() if f"blocks.{block}." in name and (p.ndim == 2) == is_matrix]
            for block in (0, 1)
        ]
        for is_matrix in (True, False)
    )
    muon = [{"params": matrices[0], "lr": 0.005}, {"params": matrices[1], "lr": 0.01}]
    rest = [
        {"params": [named["places"]], "lr": 0.00125, "weight_decay": 0.1},
        {"params": [named["tokens.weight"]], "lr": 0.00125, "weight_decay": 0.0, "betas": (0.8, 0.99)},
        {"params": vectors[0], "lr": 0.0025, "weight_decay": 0.0},
        {"params": [*vectors[1], named["norm.weight"], named["norm.bias"]], "lr": 0.005, "weight_decay": 0.0},
        {"params": [named["head.weight"]], "lr": 0.01, "weight_decay": 0.1},
    ]
    return [torch.optim.Muon(muon, weight_decay=0.1), AdamW(rest)]


# ---------------------------------------------------------------- events in mid-run


def set_first_block(model: nn.Module, is_trained: bool) -> None:
    for name, parameter in model.named_parameters():
        if is_in_first_block(name):
            parameter.requires_grad_(is_trained)


def freeze(model: nn.Module, optimizers: Sequence[Any]) -> None:
    set_first_block(model, False)


def unfreeze(model: nn.Module, optimizers: Sequence[Any]) -> None:
    set_first_block(model, True)


def add_first_block(model: nn.Module, optimizers: Sequence[Any]) -> None:
    first = [p for name, p in model.named_parameters() if is_in_first_block(name)]
    optimizers[-1].add_param_group({"params": first, "lr": 0.004, "weight_decay": 0.05})


def unfreeze_and_add(model: nn.Module, optimizers: Sequence[Any]) -> None:
    set_first_block(model, True)
    add_first_block(model, optimizers)


def clear_and_add(model: nn.Module, optimizers: Sequence[Any]) -> None:
    model.zero_grad()
    add_first_block(model, optimizers)


# ---------------------------------------------------------------- schedules


def make_warmup(optimizer: Any) -> Any:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 6) * 0.97**step)


def make_cosine(optimizer: Any) -> Any:
    return CosineAnnealingLR(optimizer, T_max=40)


Event = Callable[[nn.Module, Sequence[Any]], None]


@dataclass(frozen=True)
class Program:
    """A training program.

    Attributes:
        optimizers: Function that returns the optimizers of a model.
        plain_optimizers: The same for plain PyTorch. None: `optimizers`.
        schedules: For each optimizer, the function that returns its schedule. Default: no schedules.
        events: Functions to call before an update, by the number of that update.
        starts_frozen: Whether the first block is frozen at the start.
        is_late: Whether optimizers are created after the model is prepared.
        finds_rate: How the state is restored after a learning rate finder: "state dicts" or "checkpoint". Default: no finder.
    """

    optimizers: Callable[[nn.Module], list[Optimizer]]
    schedules: tuple[Callable[[Any], Any], ...] = ()
    events: Mapping[int, Event] = field(default_factory=dict)
    starts_frozen: bool = False
    is_late: bool = False
    finds_rate: str = ""
    plain_optimizers: Callable[[nn.Module], list[Optimizer]] | None = None

    @property
    def freezes(self) -> bool:
        """Whether parameters are frozen after the model is prepared. DDP then needs `find_unused_parameters`."""
        return freeze in self.events.values()


PROGRAMS: dict[str, Program] = {
    "one group": Program(make_single_group, (make_cosine,)),
    "named": Program(make_named_group, (make_warmup,)),
    "decay": Program(split_by_decay, (make_warmup,)),
    "decay, late": Program(split_by_decay, (make_warmup,), is_late=True),
    "decay, reversed": Program(split_by_decay_reversed, (make_warmup,)),
    "layers": Program(split_by_layer, (make_cosine,)),
    "layers, late": Program(split_by_layer, (make_cosine,), is_late=True),
    "added": Program(omit_first_block, (), {6: clear_and_add}),
    "added uncleared": Program(omit_first_block, (), {6: add_first_block}),
    "unfrozen, added": Program(omit_first_block, (), {6: unfreeze_and_add}, starts_frozen=True),
    "unfrozen": Program(separate_first_block, (make_warmup,), {6: unfreeze}, starts_frozen=True),
    "unfrozen later": Program(separate_first_block, (make_warmup,), {0: freeze, 6: unfreeze}),
    "unfrozen, all in": Program(lambda m: [AdamW(m.parameters(), lr=0.01)], (), {6: unfreeze}, starts_frozen=True),
    "frozen": Program(split_by_decay, (), {6: freeze}),
    "frozen for a while": Program(split_by_decay, (), {4: freeze, 13: unfreeze}),
    "two optimizers": Program(make_two_optimizers, (make_warmup, make_cosine)),
    "two optimizers, late": Program(make_two_optimizers, (make_warmup, make_cosine), is_late=True),
    "helper": Program(make_helper_groups, (make_warmup, make_cosine), plain_optimizers=write_helper_groups),
    "helper, late": Program(
        make_helper_groups, (make_warmup, make_cosine), is_late=True, plain_optimizers=write_helper_groups
    ),
    "finder": Program(split_by_layer, (make_warmup,), finds_rate="state dicts"),
    "finder, checkpoint": Program(split_by_layer, (make_warmup,), finds_rate="checkpoint"),
}


def get_rates(optimizers: Sequence[Any]) -> list[float]:
    return [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]


@dataclass
class Results:
    """Losses and learning rates of the updates, differences that the load reports, and warnings."""

    losses: list[float] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def move_states(before: Optimizer, after: Optimizer) -> None:
    """Copy a parameter's state from one optimizer to another, for all parameters of the latter."""
    for group in after.param_groups:
        for parameter in group["params"]:
            after.state[parameter] = before.state[parameter]


def run_by_hand(program: Program, kind: str, changed: Program | None = None) -> Results:
    """Run a program in plain PyTorch on one process.

    Args:
        program: Program to run.
        kind: Kind of model: "gpt" or "moe".
        changed: Program with other groups that takes over after `STOP` updates. Default: none.
    """
    model = build_model(kind)
    set_first_block(model, not program.starts_frozen)
    optimizers = (program.plain_optimizers or program.optimizers)(model)
    rows = Rows()
    batches = [torch.stack([rows[i] for i in range(n, n + WINDOW)]) for n in range(0, ROWS, WINDOW)]
    found = Results()
    if program.finds_rate:
        kept = copy.deepcopy((model.state_dict(), [each.state_dict() for each in optimizers]))
        for number in range(FINDER_UPDATES):
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = 1e-5 * 1.1**number
            compute_loss(model, batches[number % len(batches)]).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        model.load_state_dict(kept[0])
        for optimizer, state in zip(optimizers, kept[1]):
            optimizer.load_state_dict(state)
    schedules = [make(optimizer) for make, optimizer in zip(program.schedules, optimizers)]
    for number, ids in enumerate(batches):
        if changed is not None and number == STOP:
            before, optimizers = optimizers, changed.optimizers(model)
            move_states(before[0], optimizers[0])
            schedules = [make(optimizer) for make, optimizer in zip(changed.schedules, optimizers)]
            for schedule in schedules * STOP:
                schedule.step()
        if number in program.events:
            program.events[number](model, optimizers)
        found.rates.append(get_rates(optimizers))
        loss = compute_loss(model, ids)
        loss.backward()
        nn.utils.clip_grad_norm_([p for o in optimizers for g in o.param_groups for p in g["params"]], 0.5)
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        found.losses.append(loss.item())
    return found


def find_rate(accelerator: Any, model: Any, optimizers: Sequence[Any], loader: Any, way: str, folder: str) -> None:
    """Make updates with a rising learning rate, then restore the earlier state."""
    if way == "checkpoint":
        accelerator.save_state(folder)
    else:
        kept = copy.deepcopy((model.state_dict(), [each.state_dict() for each in optimizers]))
    number = 0
    while number < FINDER_UPDATES:
        for ids in loader:
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = 1e-5 * 1.1**number
            with accelerator.accumulate(model):
                accelerator.backward(compute_loss(model, ids))
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            number += 1
    if way == "checkpoint":
        accelerator.load_state(folder)
        return
    model.load_state_dict(kept[0])
    for optimizer, state in zip(optimizers, kept[1]):
        optimizer.load_state_dict(state)


def run_prepared(
    program: Program, kind: str, layout: str, folder: str, *, load: str = "", options: Mapping[str, Any] | None = None
) -> Results:
    """Run a program through the Accelerator: up to its checkpoint after `STOP` updates, or from a checkpoint to its end.

    Args:
        program: Program to run.
        kind: Kind of model: "gpt" or "moe".
        layout: Strategy of the Accelerator.
        folder: Folder of the checkpoint to save.
        load: Folder of the checkpoint to resume from. Default: none; the program starts and saves a checkpoint.
        options: Arguments of `resume`.
    """
    from headway import Accelerator, DistributedDataParallelKwargs, TensorParallelOptions

    handlers: list[Any] = [TensorParallelOptions(plan=GPT_PLAN)] if kind == "gpt" and "tp" in layout else []
    if layout == "ddp" and program.freezes:
        handlers.append(DistributedDataParallelKwargs(find_unused_parameters=True))
    accelerator = Accelerator(cpu=True, strategy=layout, scheduler_ticks="updates", kwargs_handlers=handlers)
    found = Results()
    try:
        model: Any = build_model(kind)
        set_first_block(model, not program.starts_frozen)
        loader: Any = DataLoader(Rows(), batch_size=WINDOW // accelerator.strategy.data_shard.count)
        if program.is_late:
            model, loader = accelerator.prepare(model, loader)
            optimizers: list[Any] = [accelerator.prepare(each) for each in program.optimizers(model)]
        else:
            optimizers = program.optimizers(model)
            model, loader, *optimizers = accelerator.prepare(model, loader, *optimizers)
        if program.finds_rate:
            find_rate(accelerator, model, optimizers, loader, program.finds_rate, f"{folder} finder")
        schedules = [accelerator.prepare(make(optimizer)) for make, optimizer in zip(program.schedules, optimizers)]
        if load:
            for number in sorted(program.events):
                if number < STOP:
                    program.events[number](model, optimizers)
            found.differences = accelerator.resume(load, **(options or {})).differences
        start = accelerator.num_updates - (STOP if load else 0)
        for _ in accelerator.epochs(1):
            for ids in loader:
                number = accelerator.num_updates - start
                if number in program.events:
                    program.events[number](model, optimizers)
                found.rates.append(get_rates(optimizers))
                with accelerator.accumulate(model):
                    loss = compute_loss(model, ids)
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(
                        [p for o in optimizers for g in o.param_groups for p in g["params"]], 0.5
                    )
                    for optimizer in optimizers:
                        optimizer.step()
                    for schedule in schedules:
                        schedule.step()
                    for optimizer in optimizers:
                        optimizer.zero_grad()
                found.losses.append(float(accelerator.reduce(loss.detach(), "mean")))
                if not load and number + 1 == STOP:
                    accelerator.save_state(folder)
                    return found
        return found
    finally:
        accelerator.free_memory()


def check_results(found: Results, expected: Results, begin: int) -> None:
    """Compare the losses and learning rates of `STOP` updates, from update `begin`, with those of plain PyTorch."""
    there = slice(begin, begin + STOP)
    assert found.losses == pytest.approx(expected.losses[there], abs=1e-6)
    for own, other in zip(found.rates, expected.rates[there], strict=True):
        assert own == pytest.approx(other, rel=1e-9)
