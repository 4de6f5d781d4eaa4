"""Thirty models in every layout, compared with plain PyTorch on one process: losses, gradient norms and weights, or a refusal.

`python -m tests.sweep.parity --models` prints the table, `--write` writes it to docs/parity.md. Each cell trains for
four updates of eight rows, with clipping and SGD with momentum. By hand, each update is one batch on one process.
"""

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, DataLoaderConfiguration
from headway.errors import HeadwayError
from tests.devices import ON_CPU
from tests.distributed.layouts import gather_weights
from tests.distributed.ranks import RankFailed, run_ranks
from tests.sweep.models import CASES

UPDATES, WINDOW, CLIP = 4, 8, 0.5
CLOSE = 1e-6
"""Largest allowed difference, relative to the largest loss, norm or weight."""
LAYOUTS = {
    "ddp": 2, "fsdp": 2, "hsdp=2": 4, "tp": 2, "fsdp+tp=2": 4, "cp": 2, "fsdp+cp=2": 4, "pp": 2, "fsdp=2+pp=2": 4, "pp=2+tp=2": 4,
    "pp=2+cp=2": 4, "ep": 2, "fsdp+ep=2": 4, "ep=2+tp=2": 4, "cp=2+ep=2": 4, "pp=2+ep=2": 4,
    "fsdp=2+ep=2+tp=2": 8,
}  # fmt: skip
PAGE = Path(__file__).resolve().parents[2] / "docs" / "parity.md"


@dataclass(frozen=True)
class Outcome:
    """Result of a cell.

    Attributes:
        difference: Largest relative difference, or None if the cell was refused or failed.
        refusal: Headway's error in one line.
        failure: Description of any other failure.
    """

    difference: float | None = None
    refusal: str = ""
    failure: str = ""

    @property
    def is_good(self) -> bool:
        """Whether the cell is equal to plain PyTorch or was refused."""
        return bool(self.refusal) or (self.difference is not None and self.difference < CLOSE)

    def __str__(self) -> str:
        if self.refusal:
            return "refused"
        return "FAILS" if self.difference is None else "equal" if self.is_good else f"{self.difference:.0e}"


def _build_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9, weight_decay=0.01)


@cache
def train_by_hand(name: str, num_parts: int) -> dict[str, Any]:
    """Train in plain PyTorch on one process.

    If the model normalizes each rank's rows separately, they pass through the model separately here too.
    """
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make().train()
    optimizer, rows = _build_optimizer(model), case.rows()
    losses, norms = [], []
    for number in range(UPDATES):
        start = number * WINDOW % len(rows[0])
        batch = [each[start : start + WINDOW] for each in rows]
        pieces = zip(*(each.chunk(num_parts) for each in batch)) if case.is_by_rank else [batch]
        kept: dict[str, torch.Tensor] = {}
        total, count = 0.0, 0
        for piece in pieces:
            loss, weight = case.loss(model, *piece)
            loss.backward()
            total, count = total + loss.item(), count + weight
            kept = kept or {name: buffer.clone() for name, buffer in model.named_buffers()}
        if case.is_by_rank:  # DDP keeps rank 0's buffers
            for name, buffer in model.named_buffers():
                buffer.copy_(kept[name])
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= count
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / count)
    return {"losses": losses, "norms": norms, "weights": gather_weights(model)}


def _count_parts(name: str, num_ranks: int) -> int:
    return num_ranks if CASES[name].is_by_rank else 1


def _train_prepared(name: str, layout: str) -> dict[str, Any]:
    """Train with the Accelerator, and return the results or Headway's refusal."""
    case = CASES[name]
    accelerator = Accelerator(
        cpu=ON_CPU, strategy=layout, dataloader_config=DataLoaderConfiguration(even_batches=False)
    )
    torch.manual_seed(0)
    model = case.make().train()
    try:
        optimizer = _build_optimizer(model)
        loader = DataLoader(TensorDataset(*case.rows()), batch_size=WINDOW // accelerator.strategy.data_shard.count)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses, norms = [], []
        while len(losses) < UPDATES:
            for batch in loader:
                if len(losses) == UPDATES:
                    break
                if loader.mask is not None and not loader.mask.all():
                    raise AssertionError("this cell must have no padded rows")
                loss, weight = case.loss(model, *batch)
                accelerator.backward(loss, weight=weight, reduction="sum")
                norms.append(accelerator.clip_grad_norm_(model.parameters(), CLIP).item())
                losses.append(float(accelerator.reduce_mean(loss.item(), weight)))
                optimizer.step()
                optimizer.zero_grad()
        return {"losses": losses, "norms": norms, "weights": accelerator.get_state_dict(model)}
    except HeadwayError as error:
        return {"refusal": f"{type(error).__name__}: {error}"}


def measure(name: str, layout: str, num_ranks: int, timeout: float = 120) -> Outcome:
    """Run one cell; compare every rank's losses and norms, and the whole weights, with those of the loop by hand."""
    try:
        by_rank = run_ranks(_train_prepared, num_ranks, name, layout, timeout=timeout)
    except RankFailed as error:
        return Outcome(failure=str(error))
    refusals = [each["refusal"] for each in by_rank if "refusal" in each]
    if refusals:
        return Outcome(refusal=" ".join(refusals[0].split()))
    expected, largest = train_by_hand(name, _count_parts(name, num_ranks)), 0.0
    for curves in by_rank:
        for kind in ("losses", "norms"):
            difference = max(abs(a - b) for a, b in zip(expected[kind], curves[kind], strict=True))
            largest = max(largest, difference / max(map(abs, expected[kind])))
    whole, weights = expected["weights"], by_rank[0]["weights"]
    if missing := sorted(whole.keys() ^ weights.keys()):
        return Outcome(failure=f"names of weights differ: {missing[:5]}")
    names = [each for each in whole if whole[each].is_floating_point()]
    scale = max(float(whole[each].abs().max()) for each in names if whole[each].numel())
    difference = max(float((whole[each] - weights[each]).abs().max()) for each in names if whole[each].numel())
    return Outcome(max(largest, difference / scale))


def measure_all(
    models: Sequence[str] = (), layouts: Sequence[str] = (), at_once: int = 2
) -> dict[tuple[str, str], Outcome]:
    """Run all cells, `at_once` of them in parallel, and print a line for each result."""
    cells = [(name, layout) for name in models or CASES for layout in layouts or LAYOUTS]
    began = time.monotonic()
    for name, layout in cells:  # before the threads start, because threads share torch's generator
        train_by_hand(name, _count_parts(name, LAYOUTS[layout]))

    def one(cell: tuple[str, str]) -> Outcome:
        outcome = measure(*cell, LAYOUTS[cell[1]])
        message = outcome.refusal or outcome.failure
        print(f"{time.monotonic() - began:5.0f} s  {cell[0]}, {cell[1]}: {outcome}  {message}", flush=True)
        return outcome

    with ThreadPoolExecutor(at_once) as pool:
        return dict(zip(cells, pool.map(one, cells)))


def format_rows(found: dict[tuple[str, str], Outcome]) -> list[list[str]]:
    """Return the table as rows of text, with one row per model and one column per layout."""
    names, layouts = list(dict.fromkeys(name for name, _ in found)), list(dict.fromkeys(layout for _, layout in found))
    heads = [f"{layout} x{LAYOUTS[layout]}" for layout in layouts]
    return [["", *heads], *([name, *(str(found[name, layout]) for layout in layouts)] for name in names)]


def write_page(found: dict[tuple[str, str], Outcome]) -> None:
    """Write the table and the refusals between the markers of docs/parity.md."""
    head, *body = format_rows(found)
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)]
    counts = [sum(str(cell) == word for cell in found.values()) for word in ("equal", "refused")]
    reasons: dict[str, dict[str, list[str]]] = {}
    for (name, layout), cell in found.items():
        if cell.refusal:
            reasons.setdefault(_shorten_refusal(name, cell.refusal), {}).setdefault(name, []).append(layout)
    message = [f"| {reason} | {'; '.join(names)} |" for reason, names in sorted(reasons.items())]
    message = ["| start of the error message | models |", "| --- | --- |", *message]
    text = PAGE.read_text()
    before, after = text.split("<!-- table -->\n")[0], text.split("<!-- /table -->\n")[1]
    total = (
        f"Of {len(found)} cells, {counts[0]} are *equal*, {counts[1]} are *refused*, and {len(found) - sum(counts)} have "
        "another result. "
        "The next table lists the error messages of the refused cells, and the models that cause them."
    )
    PAGE.write_text(
        "\n".join([f"{before}<!-- table -->", *lines, "", total, "", *message, f"<!-- /table -->\n{after}"])
    )


def _shorten_refusal(name: str, refusal: str) -> str:
    """Return the first clause of a refusal, with the model's class replaced by "the model"."""
    kind = type(CASES[name].make()).__name__
    text = re.sub(rf"\b(FSDP)?{kind}\b", "the model", refusal.partition(": ")[2])
    return re.split(r"[:;] |\. |, but |, too few", text)[0].replace("*", r"\*")
