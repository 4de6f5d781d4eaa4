"""Checkpoints of every layout and number of ranks, saved in mid-epoch and loaded under every other one.

`python -m tests.sweep.layouts` does it for all pairs, with a Llama of transformers, and prints how far the losses of the updates
after a load lie from those of the run that was never stopped; `--model gpt` takes the small GPT that the suite takes, `--model moe`
a mixture of experts and the layouts of those; `--pairs_with pp=2+cp=2@4` only loads into and out of that one. What was loaded must be
what was saved, to the bit: the model's whole weights, and a second checkpoint, which is written at once.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from headway.core.checkpoint.loading.files import verify_checkpoint
from tests.distributed.cut_models import GPT, GPT_PLAN, llama, mixtral
from tests.distributed.ranks import run_ranks
from tests.sweep.tables import laid_out
from tests.unit.core.checkpoint.reading import read_tensors

ROWS, WINDOW, UPDATES = 120, 24, 8
"""An epoch has five updates, so that a run which is stopped after three of them stops in mid-epoch."""

STOP = 3
CLOSE = 1e-6
CLOSE_IN_FLOAT32 = 2e-5
"""How far losses may lie apart. Models are of float64: the order in which floats are added differs, and Adam makes the most of it."""

MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "gpt": GPT,
    "llama": partial(llama, use_cache=False),
    "moe": mixtral,
}
FLOAT32 = ", float32"
"""Behind the name of a model: DeepSpeed knows no float64."""


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


def _cells(layouts: dict[int, tuple[str, ...]]) -> tuple[Cell, ...]:
    return tuple(Cell(layout, num_ranks) for num_ranks, each in layouts.items() for layout in each)


OWN = _cells({
    8: ("pp=2+fsdp=2+tp=2", "ddp=2+pp=2+fsdp=2", "fsdp"),
    4: ("fsdp", "hsdp=2", "fsdp+tp=2", "fsdp+cp=2", "ddp=2+pp=2", "pp=2+fsdp", "pp=2+tp", "pp=2+cp=2", "ddp"),
    2: ("fsdp", "tp", "cp", "pp", "ddp"), 3: ("fsdp", "ddp"), 1: ("ddp",),
})  # fmt: skip
MOE = _cells({
    8: ("ddp=2+fsdp=2+ep=2", "fsdp+ep=4", "fsdp=2+ep=2+tp=2", "pp=2+fsdp=2+tp=2", "pp=2+fsdp=2+ep=2"),
    4: ("ep", "fsdp+ep=2", "ddp=2+ep=2", "ep=2+tp=2", "cp=2+ep=2", "fsdp", "pp=2+fsdp", "pp=2+tp", "pp=2+ep"),
    2: ("ep", "fsdp", "tp", "pp", "ddp"), 1: ("ddp",),
})  # fmt: skip
"""Of a mixture of experts."""
ENGINES = tuple(Cell(f"zero{stage}", 2) for stage in (1, 2, 3))
"""DeepSpeed's, where that is installed."""


class Rows(Dataset):
    """Sequences whose next number can be learned."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return (index + (1 + index // 37) * torch.arange(9)) % 37


@dataclass(frozen=True)
class Told:
    """What one run came to.

    Attributes:
        losses: of its updates.
        seen: the samples of each update, sorted.
        differences: what the load told.
        loaded: the whole weights behind the load, on rank 0.
    """

    losses: list[float]
    seen: list[list[int]]
    differences: list[str]
    loaded: dict[str, torch.Tensor] = field(default_factory=dict)


def built(name: str) -> torch.nn.Module:
    """The model, its last norm frozen."""
    torch.manual_seed(0)
    model = MODELS[name.removesuffix(FLOAT32)]()
    model = model if name.endswith(FLOAT32) else model.double()
    (model.norm if name.startswith("gpt") else model.model.norm).weight.requires_grad_(False)  # type: ignore[union-attr]
    return model


def train(job: "Job", name: str) -> Told:
    """A run until so many updates; it goes on from `load`, and saves at the end, or behind one more update."""
    from headway import Accelerator, TensorParallelOptions, set_seed

    set_seed(1)
    options = [TensorParallelOptions(plan=GPT_PLAN)] if name.startswith("gpt") and "tp" in job.layout else None
    accelerator = Accelerator(cpu=True, strategy=job.layout, scheduler_ticks="updates", kwargs_handlers=options)
    model = built(name)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.03)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    loader: Any = DataLoader(Rows(), batch_size=WINDOW // accelerator.strategy.data_shard.count, shuffle=True)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    torch.manual_seed(2)  # a layout may have drawn from the stream that the loader's seed comes from
    loader = accelerator.prepare(loader)
    told = Told([], [], [])
    try:
        if job.load is not None:
            told.differences.extend(accelerator.resume(job.load).differences)
            told.loaded.update({name: each.clone() for name, each in accelerator.get_state_dict(model).items()})
            accelerator.save_state(job.again)
        for _ in accelerator.epochs(2):
            for ids in loader:
                step(accelerator, model, optimizer, schedule, ids, told)
                if job.save is not None and accelerator.num_updates == job.until:
                    accelerator.save_state(job.save, blocking=not job.is_behind)
                if accelerator.num_updates == job.until + job.is_behind:  # it has learned while that was written
                    return told
        raise AssertionError("the epochs were too short")
    finally:
        if job.save is not None:
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
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


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

    @property
    def again(self) -> Path:
        """Where what it has loaded is written once more."""
        assert self.load is not None
        return self.load.with_name(f"{self.load.name} into {self.layout}")


def _all(jobs: Sequence[Job], name: str) -> list[Told]:
    return [train(job, name) for job in jobs]


def run(num_ranks: int, jobs: Sequence[Job], name: str, timeout: float = 300) -> list[Told]:
    """What the jobs came to on so many processes, all alike on every rank, with the model of that name.

    Raises:
        AssertionError: ranks tell different things.
    """
    found = run_ranks(_all, num_ranks, jobs, name, timeout=timeout)
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


def state(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's whole weights and state of the optimizer."""
    found = dict(read_tensors(folder, verify_checkpoint(folder)))
    return {name: tensor for name, tensor in found.items() if name.startswith(("model/", "optimizer/"))}


def check_loaded(job: Job, told: Told) -> None:
    """What was saved, what a job loaded and gathered, and what it wrote at once are the same bits; the second checkpoint is removed.

    Raises:
        AssertionError: something differs.
    """
    assert job.load is not None
    saved, again = state(job.load), state(job.again)
    assert any("exp_avg_sq" in name for name in saved)
    assert saved.keys() == again.keys(), f"other tensors: {sorted(saved.keys() ^ again.keys())}"
    differing = [name for name, tensor in saved.items() if not torch.equal(tensor, again[name])]
    differing += [name for name, tensor in saved.items()
                  if name.startswith("model/") and not torch.equal(tensor, told.loaded[name.removeprefix("model/0/")])]  # fmt: skip
    assert not differing, f"other values after the load: {differing}"
    shutil.rmtree(job.again)


def close(name: str) -> float:
    """How far the losses of a model may lie apart."""
    return CLOSE_IN_FLOAT32 if name.endswith(FLOAT32) else CLOSE


def names_layouts(told: Told) -> bool:
    """Does the load tell that tensors were cut in another way?"""
    return any(line.startswith("layout ") for line in told.differences)


# -------------------------------------------------------------------- all pairs


def matrix(
    folder: Path, cells: Sequence[Cell], name: str, pairs_with: Sequence[str] = ()
) -> dict[tuple[Cell, Cell], float | str]:
    """By source and target: the largest difference, or what went wrong.

    Args:
        folder: for the checkpoints.
        cells: from and into which.
        name: of the model.
        pairs_with: only pairs of which one is among these; none: all.

    Raises:
        AssertionError: a run that begins differs from that of one process, or a save behind the loop from one in step.
    """
    whole = run(1, [Job("ddp")], name)[0]
    assert max(whole.losses) - min(whole.losses) > 0.1, f"it learns nothing: {whole.losses}"
    for num_ranks in sorted({cell.num_ranks for cell in cells}):
        jobs = [Job(cell.layout, None, folder / f"{cell}{' behind' * is_behind}", STOP, is_behind)
                for cell in cells if cell.num_ranks == num_ranks for is_behind in (False, True)]  # fmt: skip
        for job, told in zip(jobs, run(num_ranks, jobs, name, 600), strict=True):
            assert compared(told, whole, 0) < close(name), job
    for cell in cells:
        step, behind = state(folder / str(cell)), state(folder / f"{cell} behind")
        assert step.keys() == behind.keys(), cell
        assert all(torch.equal(tensor, behind[name]) for name, tensor in step.items()), cell
    found: dict[tuple[Cell, Cell], float | str] = {}
    for target in cells:
        sources = [each for each in cells if not pairs_with or {str(each), str(target)} & set(pairs_with)]
        jobs = [Job(target.layout, folder / str(source)) for source in sources]
        began = time.monotonic()
        try:
            ran: Iterable[Any] = run(target.num_ranks, jobs, name, 600)
        except AssertionError as error:
            ran = [error] * len(jobs)
        for source, job, told in zip(sources, jobs, ran, strict=True):
            found[source, target] = _verdict(source, target, job, told, whole)
        print(f"into {target}: {time.monotonic() - began:.0f} s", flush=True)
    return found


def _verdict(source: Cell, target: Cell, job: Job, told: Any, whole: Told) -> float | str:
    if isinstance(told, AssertionError):
        return str(told)
    try:
        check_loaded(job, told)
        return compared(told, whole)
    except AssertionError as error:
        return f"{source} -> {target}: {error}"


def main() -> int:
    """Print the matrix; 1 where a cell is not as promised."""
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--model", choices=MODELS, default="llama", help="moe: with layouts of experts")
    reader.add_argument("--only", nargs="*", help="cells such as fsdp@4 and single@1")
    reader.add_argument("--pairs_with", nargs="*", default=(), help="only loads into and out of these cells")
    reader.add_argument("--zero", action="store_true", help="DeepSpeed's stages too, and all in float32")
    asked = reader.parse_args()
    name = asked.model + FLOAT32 * asked.zero
    known = (*(MOE if asked.model == "moe" else OWN), *(ENGINES if asked.zero else ()))
    cells = [cell for cell in known if not asked.only or str(cell) in asked.only]
    folder, began = Path(tempfile.mkdtemp(prefix="headway-layouts-")), time.monotonic()
    found = matrix(folder, cells, name, asked.pairs_with)
    rows = [["from / into", *map(str, cells)]]
    for source in cells:
        values = [found.get((source, target), "-") for target in cells]
        rows.append(
            [
                str(source),
                *(f"{one:.0e}" if isinstance(one, float) else one if one == "-" else "FAILS" for one in values),
            ]
        )
    bad = [one for one in found.values() if isinstance(one, str) or one >= close(name)]
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
