"""Checkpoints of every layout and number of ranks, saved in mid-epoch and loaded under every other one.

`python -m tests.sweep.layouts` does it for all pairs, with a Llama of transformers, and prints how far the losses of the updates
after a load lie from those of the run that was never stopped; `--small` takes the small GPT that the suite takes.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from tests.distributed.cut_models import GPT, GPT_PLAN, llama
from tests.distributed.ranks import run_ranks
from tests.sweep.tables import laid_out

ROWS, WINDOW, UPDATES = 60, 12, 8
"""An epoch has five updates, so that a run which is stopped after three of them stops in mid-epoch."""

STOP = 3
CLOSE = 2e-5
"""How far losses may lie apart: the order in which floats are added differs, and Adam makes the most of it."""


@dataclass(frozen=True)
class Cell:
    """A layout on a number of ranks.

    Attributes:
        layout: as it is written; "ddp" on one rank is plain PyTorch.
        num_ranks: in all.
    """

    layout: str
    num_ranks: int

    def __str__(self) -> str:
        return f"{self.layout if self.num_ranks > 1 else 'single'}@{self.num_ranks}"


OWN = tuple(
    Cell(layout, num_ranks)
    for num_ranks, layouts in {
        8: ("pp=2+fsdp=2+tp=2",),
        4: ("fsdp", "hsdp=2", "fsdp+tp=2", "fsdp+cp=2", "ddp=2+pp=2", "pp=2+fsdp", "pp=2+tp", "ddp"),
        2: ("fsdp", "tp", "cp", "pp", "ddp"), 3: ("fsdp", "ddp"), 1: ("ddp",),
    }.items()
    for layout in layouts
)  # fmt: skip
ENGINES = tuple(Cell(f"zero{stage}", 2) for stage in (1, 2, 3))
"""DeepSpeed's, where that is installed."""


class Rows(Dataset):
    """Sequences whose next number can be learned."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return (index + (1 + index % 2) * torch.arange(9)) % 37


@dataclass(frozen=True)
class Told:
    """What one run came to.

    Attributes:
        losses: of its updates.
        seen: the samples of each update, sorted.
        differences: what the load told.
    """

    losses: list[float]
    seen: list[list[int]]
    differences: list[str]


def built(is_small: bool) -> torch.nn.Module:
    """The model, its head tied and its last norm frozen."""
    torch.manual_seed(0)
    model = GPT() if is_small else llama(use_cache=False)
    (model.norm if is_small else model.model.norm).weight.requires_grad_(False)  # type: ignore[union-attr]
    return model


def train(
    layout: str, is_small: bool, load: Path | None = None, save: Path | None = None, until: int = UPDATES,
    is_behind: bool = False,
) -> Told:  # fmt: skip
    """A run until so many updates; it goes on from `load`, and saves at the end, or behind one more update."""
    from headway import Accelerator, TensorParallelOptions, set_seed

    set_seed(1)
    options = [TensorParallelOptions(plan=GPT_PLAN)] if is_small and "tp" in layout else None
    accelerator = Accelerator(cpu=True, strategy=layout, scheduler_ticks="updates", kwargs_handlers=options)
    model = built(is_small)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.03)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    loader: Any = DataLoader(Rows(), batch_size=WINDOW // accelerator.strategy.data_shard.count, shuffle=True)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    torch.manual_seed(2)  # a layout may have drawn from the stream that the loader's seed comes from
    loader = accelerator.prepare(loader)
    told = Told([], [], [] if load is None else accelerator.resume(load).differences)
    try:
        for _ in accelerator.epochs(2):
            for ids in loader:
                step(accelerator, model, optimizer, schedule, ids, told)
                if save is not None and accelerator.num_updates == until:
                    accelerator.save_state(save, blocking=not is_behind)
                if accelerator.num_updates == until + is_behind:  # it has learned while that was written
                    return told
        raise AssertionError("the epochs were too short")
    finally:
        if save is not None:
            accelerator.wait_for_save()
        accelerator.free_memory()


def step(accelerator: Any, model: Any, optimizer: Any, schedule: Any, ids: torch.Tensor, told: Told) -> None:
    """An update, of which the loss and the samples are noted."""
    with accelerator.accumulate(model):
        loss = loss_of(model, ids)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    told.losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    told.seen.append(sorted(accelerator.gather_for_metrics(ids[:, 0] * 37 + ids[:, 1]).tolist()))


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Of the next token."""
    found = model(ids)
    logits = getattr(found, "logits", found)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


@dataclass(frozen=True)
class Job:
    """One run among those that one set of processes makes.

    Attributes:
        layout: of the run.
        load: the checkpoint it goes on from; None: it begins.
        save: where it saves; None: it does not.
        until: updates after which it does, or ends.
        is_behind: the save is written behind the loop.
    """

    layout: str
    load: Path | None = None
    save: Path | None = None
    until: int = UPDATES
    is_behind: bool = False


def _all(jobs: Sequence[Job], is_small: bool) -> list[Told]:
    return [train(job.layout, is_small, job.load, job.save, job.until, job.is_behind) for job in jobs]


def run(num_ranks: int, jobs: Sequence[Job], is_small: bool, timeout: float = 300) -> list[Told]:
    """What the jobs came to on so many processes, all alike on every rank.

    Raises:
        AssertionError: ranks tell different things.
    """
    found = run_ranks(_all, num_ranks, jobs, is_small, timeout=timeout)
    for told in found[1:]:
        assert [one.losses for one in told] == [one.losses for one in found[0]], "ranks have different losses"
    return list(found[0])


def compared(told: Told, whole: Told, begin: int = STOP) -> float:
    """How far the losses lie from those of the undisturbed run.

    Raises:
        AssertionError: its updates are of other samples, or of another number.
    """
    there = slice(begin, begin + len(told.losses))
    assert told.seen == whole.seen[there], f"other samples: {told.seen} instead of {whole.seen[there]}"
    return max(abs(one - other) for one, other in zip(told.losses, whole.losses[there], strict=True))


def names_layouts(told: Told) -> bool:
    """Does the load tell that tensors were cut in another way?"""
    return any(line.startswith("layout ") for line in told.differences)


# -------------------------------------------------------------------- all pairs


def matrix(folder: Path, cells: Sequence[Cell], is_small: bool) -> dict[tuple[str, str, bool], float | str]:
    """By source, target and whether it was saved behind the loop: the largest difference, or what went wrong."""
    whole = run(1, [Job("ddp")], is_small)[0]
    assert max(whole.losses) - min(whole.losses) > 0.1, f"it learns nothing: {whole.losses}"
    kinds = [(cell, is_behind) for cell in cells for is_behind in (False, True)]
    for num_ranks in _numbers(cells):
        jobs = [Job(cell.layout, None, _place(folder, cell, is_behind), STOP, is_behind)
                for cell, is_behind in kinds if cell.num_ranks == num_ranks]  # fmt: skip
        for told in run(num_ranks, jobs, is_small, 600):
            assert compared(told, whole, 0) < CLOSE
    found: dict[tuple[str, str, bool], float | str] = {}
    for target in cells:
        jobs = [Job(target.layout, _place(folder, source, is_behind)) for source, is_behind in kinds]
        began = time.monotonic()
        try:
            ran: Iterable[Any] = run(target.num_ranks, jobs, is_small, 600)
        except AssertionError as error:
            ran = [error] * len(jobs)
        for (source, is_behind), told in zip(kinds, ran, strict=True):
            found[str(source), str(target), is_behind] = _verdict(source, target, told, whole)
        print(f"into {target}: {time.monotonic() - began:.0f} s", flush=True)
    return found


def _verdict(source: Cell, target: Cell, told: Any, whole: Told) -> float | str:
    if isinstance(told, AssertionError):
        return str(told)
    try:
        return compared(told, whole)
    except AssertionError as error:
        return f"{source} -> {target}: {error}"


def _numbers(cells: Sequence[Cell]) -> list[int]:
    return sorted({cell.num_ranks for cell in cells}, reverse=True)


def _place(folder: Path, cell: Cell, is_behind: bool) -> Path:
    return folder / f"{cell}{' behind' if is_behind else ''}"


def main() -> int:
    """Print the matrix; 1 where a cell is not as promised."""
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--small", action="store_true", help="the suite's GPT instead of a Llama of transformers")
    reader.add_argument("--only", nargs="*", help="cells such as fsdp@4 and single@1")
    reader.add_argument("--zero", action="store_true", help="DeepSpeed's stages too")
    asked = reader.parse_args()
    cells = [cell for cell in (*OWN, *(ENGINES if asked.zero else ())) if not asked.only or str(cell) in asked.only]
    folder, began = Path(tempfile.mkdtemp(prefix="headway-layouts-")), time.monotonic()
    found = matrix(folder, cells, asked.small)
    rows = [["from / into", *map(str, cells)]]
    for source in cells:
        for is_behind in (False, True):
            values = [found[str(source), str(target), is_behind] for target in cells]
            rows.append([f"{source}{', behind' if is_behind else ''}",
                         *("FAILS" if isinstance(one, str) else f"{one:.0e}" for one in values)])  # fmt: skip
    bad = [one for one in found.values() if isinstance(one, str) or one >= CLOSE]
    numbers = [one for one in found.values() if not isinstance(one, str)]
    print(f"\nlargest difference of a loss, of {UPDATES - STOP} updates after each load:\n{laid_out(rows)}")
    print(f"{len(found)} loads, {len(bad)} not as promised; largest {max(numbers, default=0):.1e}; "
          f"{time.monotonic() - began:.0f} s")  # fmt: skip
    for one in dict.fromkeys(map(str, bad)):
        print(one)
    if not bad:
        shutil.rmtree(folder)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
