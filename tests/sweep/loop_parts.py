"""Draws a random training loop from a seed, and builds its model, optimizers, schedule and loader."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset
from torch.utils.data import WeightedRandomSampler as Weighted

from tests.distributed.layouts import GPT, LENGTH, PADDING, VOCABULARY

SHARDS = {
    "none": (1, 1), "ddp@2": (2, 2), "ddp@3": (3, 3), "fsdp@2": (2, 2), "fsdp@3": (3, 3), "hsdp=2@4": (4, 4), "tp@2": (2, 1),
    "fsdp+tp=2@4": (4, 2), "ddp=2+tp=2@4": (4, 2), "pp@2": (2, 1), "ddp=2+pp=2@4": (4, 2), "cp@2": (2, 1), "fsdp+pp=2@4": (4, 2),
    "fsdp+cp=2@4": (4, 2),
}  # fmt: skip
"""{layout: (number of ranks, number of ranks that read different rows)}."""

OPTIMIZERS = (
    "sgd",
    "nesterov",
    "adam",
    "adamw",
    "groups",
    "adagrad",
    "rmsprop",
    "nadam",
    "adamax",
    "adadelta",
    "fused",
    "amsgrad",
    "radam",
    "asgd",
)
_FUNCTIONS = ("forward_backward", "microbatches")


@dataclass(frozen=True)
class Loop:
    """A random training loop.

    Attributes:
        seed: Seed of the model, the rows and their order.
        layout: Key of `SHARDS`.
        resumed: Layout in which the run resumes, or "" if it is not saved.
        saved_at: Number of the micro-batch after which the run is saved; 0 if it is not.
        form: "accumulate", "by hand" (the loop itself decides when to step), "forward_backward" or "microbatches".
        batch_size: Batch size of one data shard.
        data: Kind of dataset or sampler.
        loss: Mean over "rows" or "tokens", "sum" over tokens, "mask" (mean over valid rows), or "penalty" (a second loss on weights).
        ticks: Unit of the schedule's steps: "" (Headway's default), "micro-batches" or "updates".
        ends_at: Number of micro-batches after which the loop leaves the first epoch; 0 for never.
        skipped: Numbers of the micro-batches that the loop skips.
        out_of_memory: Number of the forward that runs out of memory on the last rank (microbatching="auto"); 0 for none.
    """

    seed: int
    layout: str
    resumed: str
    saved_at: int
    form: str
    steps: int
    crosses_epochs: bool
    num_rows: int
    batch_size: int
    is_split: bool
    drops_last: bool
    dispatches: bool
    data: str
    num_workers: int
    optimizer: str
    foreach: bool | None
    num_optimizers: int
    schedule: str
    ticks: str
    clip: str
    loss: str
    num_epochs: int
    ends_at: int
    skipped: tuple[int, ...]
    evaluates_every: int
    recomputes: bool
    averages: bool
    is_frozen: bool
    is_tied: bool
    out_of_memory: int
    pipeline: str
    in_background: bool

    @property
    def num_shards(self) -> int:
        return SHARDS[self.layout][1]

    @property
    def whole_batch(self) -> int:
        return self.batch_size * self.num_shards

    def uses(self, axis: str) -> bool:
        return axis in self.layout + self.resumed

    def __str__(self) -> str:
        plain = (("seed", self.seed), *((each.name, getattr(self, each.name)) for each in fields(self)[1:]))
        return ", ".join(f"{name}={value}" for name, value in plain if value not in ("", 0, False, None, ()))


def draw_loop(seed: int) -> Loop:
    """Return the loop of a seed. Combinations that the documentation says are refused are not drawn."""
    draw = random.Random(seed)
    layout = draw.choice(list(SHARDS))
    is_saved = draw.random() < 0.5
    alike = [other for other in SHARDS if SHARDS[other][1] == SHARDS[layout][1]]
    resumed = draw.choice([layout, layout, *alike, draw.choice(list(SHARDS))]) if is_saved else ""
    has_stages, has_parts = "pp" in layout + resumed, any(axis in layout + resumed for axis in ("tp", "cp", "pp"))
    form = draw.choice(["accumulate", "accumulate", "by hand", *_FUNCTIONS])
    form = "forward_backward" if form == "microbatches" and has_stages else form
    is_by_hand = form == "by hand"
    losses = ["rows", "penalty"] if is_by_hand else ["rows", "tokens", "sum"]
    losses += ["mask", "penalty"] if form == "accumulate" else []
    batch_size = draw.choice([2, 4] if has_stages else [1, 2, 3, 4])
    optimizer = draw.choice(OPTIMIZERS)
    # A resumed loop that counts its batches itself starts to count at 0 again (docs/checkpoints.md).
    breaks = not is_saved and not is_by_hand
    num_optimizers = 2 if not has_stages and draw.random() < 0.15 else 1
    schedules = ["", "epoch"] if num_optimizers > 1 else ["", "step", "lambda", "cosine", "epoch", "sequential"]
    schedules += [] if num_optimizers > 1 or is_by_hand else ["plateau"]
    schedules += ["onecycle"] if num_optimizers == 1 and optimizer not in ("adagrad", "adadelta", "asgd") else []
    loop = Loop(
        seed, layout,
        resumed=resumed if not is_by_hand or not is_saved else layout,
        saved_at=draw.randint(1, 9) if is_saved else 0,
        form=form,
        steps=draw.choice([1, 1, 2, 3, 4]),
        crosses_epochs=not is_by_hand and draw.random() < 0.2,
        num_rows=batch_size * SHARDS[layout][1] * draw.randint(4, 9) if is_by_hand else draw.randint(9, 37),
        batch_size=batch_size,
        is_split=not is_by_hand and resumed in ("", *alike) and draw.random() < 0.2,
        drops_last=draw.random() < 0.2,
        dispatches=draw.random() < 0.15,
        data=draw.choice(["plain", "shuffled", "shuffled", "iterable", "batch sampler", "weighted", "dicts", "generator"]),
        num_workers=draw.choice([0, 0, 0, 1]),
        optimizer=optimizer,
        foreach=draw.choice([None, True, False]),
        num_optimizers=num_optimizers,
        schedule=draw.choice(schedules),
        ticks=draw.choice(["", "updates"] if is_by_hand else ["", "micro-batches", "updates"]),
        clip=draw.choice(["", "norm", "value"]),
        loss=draw.choice([loss for loss in losses if loss != "penalty" or not has_stages]),
        num_epochs=draw.choice([1, 2, 3]),
        ends_at=draw.choice([0, 0, 3, 5]) if breaks else 0,
        skipped=draw.choice([(), (), (1,), (0, 2)]) if breaks else (),
        evaluates_every=0 if is_saved else draw.choice([0, 0, 2, 3]),
        recomputes=draw.random() < 0.15,
        averages=not has_stages and not is_saved and draw.random() < 0.2,
        is_frozen=draw.random() < 0.2,
        is_tied=draw.random() < 0.3,
        out_of_memory=draw.randint(1, 6) if form in _FUNCTIONS and not has_parts and draw.random() < 0.5 else 0,
        pipeline=draw.choice(["", "1f1b"]) if "pp" in layout and form == "forward_backward" else "",
        in_background=draw.random() < 0.2,
    )  # fmt: skip
    # torch's sampler draws once more after the last batch. A loop that breaks earlier never triggers this draw.
    return replace(loop, ends_at=0) if loop.data == "generator" else loop


# ---------------------------------------------------------------- parts of both loops


def build_model(loop: Loop) -> nn.Module:
    torch.manual_seed(loop.seed)
    model = GPT(tied=loop.is_tied).double()
    if loop.is_frozen:
        model.blocks[0].requires_grad_(False)
    return model


def list_trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def build_optimizers(loop: Loop, model: nn.Module) -> list[torch.optim.Optimizer]:
    count = loop.num_optimizers
    return [_build_optimizer(loop, list_trained_parameters(model)[number::count]) for number in range(count)]


def _build_optimizer(loop: Loop, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    how: dict[str, Any] = {} if loop.foreach is None else {"foreach": loop.foreach}
    matrices, vectors = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-3}]
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01, **how),
        "nesterov": lambda: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, **how),
        "adam": lambda: torch.optim.Adam(parameters, lr=1e-2, **how),
        "adamw": lambda: torch.optim.AdamW(parameters, lr=1e-2, **how),
        "groups": lambda: torch.optim.AdamW(groups, lr=1e-2),
        "adagrad": lambda: torch.optim.Adagrad(parameters, lr=1e-2, **how),
        "rmsprop": lambda: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5, centered=True, **how),
        "nadam": lambda: torch.optim.NAdam(parameters, lr=1e-2, **how),
        "adamax": lambda: torch.optim.Adamax(parameters, lr=1e-2, **how),
        "adadelta": lambda: torch.optim.Adadelta(parameters, lr=1.0, **how),
        "fused": lambda: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
        "amsgrad": lambda: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True, **how),
        "radam": lambda: torch.optim.RAdam(parameters, lr=1e-2, weight_decay=0.1, **how),
        "asgd": lambda: torch.optim.ASGD(parameters, lr=1e-2, **how),
    }
    return makers[loop.optimizer]()


def build_schedule(loop: Loop, optimizer: torch.optim.Optimizer) -> Any:
    lrs = torch.optim.lr_scheduler
    if loop.schedule == "sequential":
        parts = [lrs.LinearLR(optimizer, 0.1, 1.0, total_iters=3), lrs.ExponentialLR(optimizer, 0.9)]
        return lrs.SequentialLR(optimizer, parts, milestones=[3])
    makers: dict[str, Callable[[], Any]] = {
        "": lambda: None,
        "step": lambda: lrs.StepLR(optimizer, 2, 0.5),
        "epoch": lambda: lrs.StepLR(optimizer, 1, 0.5),
        "lambda": lambda: lrs.LambdaLR(optimizer, lambda tick: min(1.0, (tick + 1) / 4) * 0.95**tick),
        "onecycle": lambda: lrs.OneCycleLR(optimizer, max_lr=0.05, total_steps=500),
        "cosine": lambda: lrs.CosineAnnealingWarmRestarts(optimizer, 3),
        "plateau": lambda: lrs.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
    }
    return makers[loop.schedule]()


def make_rows(loop: Loop) -> tuple[torch.Tensor, ...]:
    """Return token IDs, targets that end at a different position in each row, and the row numbers."""
    generator = torch.Generator().manual_seed(loop.seed + 1)
    ids = torch.randint(1, VOCABULARY, (loop.num_rows, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH, (loop.num_rows, 1), generator=generator)
    return ids, ids.roll(-1, 1).masked_fill(torch.arange(LENGTH) >= lengths, PADDING), torch.arange(loop.num_rows)


class _Dicts(Dataset[Any]):
    def __init__(self, loop: Loop) -> None:
        self.rows = make_rows(loop)

    def __len__(self) -> int:
        return len(self.rows[0])

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return dict(zip(("ids", "targets", "number"), (column[number] for column in self.rows)))


class _Stream(IterableDataset[Any]):
    def __init__(self, loop: Loop) -> None:
        self.rows = make_rows(loop)

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(*self.rows))


def build_loader(loop: Loop, size: int) -> DataLoader[Any]:
    dataset = TensorDataset(*make_rows(loop))
    last, drawing = loop.drops_last, torch.Generator().manual_seed(loop.seed)
    more: dict[str, Any] = {"num_workers": loop.num_workers}
    if loop.data == "iterable":  # several workers would each read all rows
        return DataLoader(_Stream(loop), size, drop_last=last)
    if loop.data == "dicts":
        return DataLoader(_Dicts(loop), size, drop_last=last, **more)
    if loop.data == "batch sampler":
        return DataLoader(dataset, batch_sampler=BatchSampler(SequentialSampler(dataset), size, last), **more)
    if loop.data == "weighted":
        weights = [1.0 + number % 3 for number in range(loop.num_rows)]
        more["sampler"] = Weighted(weights, loop.num_rows, generator=drawing)
    else:
        more |= {
            "shuffle": loop.data in ("shuffled", "generator"),
            "generator": drawing if loop.data == "generator" else None,
        }
    return DataLoader(dataset, size, drop_last=last, **more)


def compute_row_losses(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's mean loss over its tokens, and its summed loss."""
    each = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="none")
    sums = each.view(targets.shape).sum(1)
    return sums / (targets != PADDING).sum(1), sums


def compute_penalty(model: nn.Module) -> torch.Tensor:
    return 1e-2 * sum(parameter.square().sum() for parameter in list_trained_parameters(model))  # type: ignore[return-value]


def build_evaluation_loader(loop: Loop) -> DataLoader[Any]:
    size = (loop.batch_size + 1) * (loop.num_shards if loop.is_split else 1)
    return DataLoader(TensorDataset(torch.arange(loop.num_rows)), batch_size=size)
