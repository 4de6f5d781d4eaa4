"""Checkpoints of every layout and number of ranks, saved in the middle of an epoch and loaded in every other layout.

`python -m tests.sweep.layouts` tests all pairs with a Llama model of transformers. It prints the largest difference
between losses after a load and those of an uninterrupted run. `--model gpt` uses the small GPT of the test suite,
`--model moe` a mixture of experts with its own layouts. `--pairs_with pp=2+cp=2@4` tests only loads into and out of
this layout.

The loaded state must equal the saved one bit for bit. The sweep compares the model's whole weights, and a second
checkpoint that is written directly after the load.
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
from tests.sweep.tables import format_columns
from tests.unit.core.checkpoint.reading import read_tensors

ROWS, WINDOW, UPDATES = 120, 24, 8
"""An epoch has five updates, so a run that stops after three of them stops in the middle of an epoch."""

STOP = 3
CLOSE = 1e-6
CLOSE_IN_FLOAT32 = 2e-5
"""Largest allowed differences of losses. Models use float64, because layouts sum in different orders, and Adam amplifies this."""

MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "gpt": GPT,
    "llama": partial(llama, use_cache=False),
    "moe": mixtral,
}
FLOAT32 = ", float32"
"""Suffix of a model's name for float32, because DeepSpeed does not support float64."""


@dataclass(frozen=True)
class Cell:
    """A layout on a given number of ranks.

    Attributes:
        layout: Value of `strategy`; "ddp" on one rank is plain PyTorch.
        num_ranks: Total number of ranks.
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
"""Layouts for a mixture of experts."""
ENGINES = tuple(Cell(f"zero{stage}", 2) for stage in (1, 2, 3))
"""Layouts of DeepSpeed, if it is installed."""


class Rows(Dataset):
    """Token sequences in which the next number is predictable."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return (index + (1 + index // 37) * torch.arange(9)) % 37


@dataclass(frozen=True)
class Result:
    """Result of one run.

    Attributes:
        losses: Loss of each update.
        seen: Sorted samples of each update.
        differences: Differences from the saved run that the load reported.
        loaded: Whole weights after the load, on rank 0.
    """

    losses: list[float]
    seen: list[list[int]]
    differences: list[str]
    loaded: dict[str, torch.Tensor] = field(default_factory=dict)


def build_model(name: str) -> torch.nn.Module:
    """Build the model with its last norm frozen."""
    torch.manual_seed(0)
    model = MODELS[name.removesuffix(FLOAT32)]()
    model = model if name.endswith(FLOAT32) else model.double()
    (model.norm if name.startswith("gpt") else model.model.norm).weight.requires_grad_(False)  # type: ignore[union-attr]
    return model


def train(job: "Job", name: str) -> Result:
    """Train on this rank as the job says, and return its losses, samples and loaded weights.

    The run resumes from `job.load`, and ends after `job.until` updates. A save in the background is followed by one
    more update.
    """
    from headway import Accelerator, TensorParallelOptions, set_seed

    set_seed(1)
    options = [TensorParallelOptions(plan=GPT_PLAN)] if name.startswith("gpt") and "tp" in job.layout else None
    accelerator = Accelerator(cpu=True, strategy=job.layout, scheduler_ticks="updates", kwargs_handlers=options)
    model = build_model(name)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.03)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    loader: Any = DataLoader(Rows(), batch_size=WINDOW // accelerator.strategy.data_shard.count, shuffle=True)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    torch.manual_seed(2)  # some layouts draw from the generator that also provides the loader's seed
    loader = accelerator.prepare(loader)
    result = Result([], [], [])
    try:
        if job.load is not None:
            result.differences.extend(accelerator.resume(job.load).differences)
            result.loaded.update({name: each.clone() for name, each in accelerator.get_state_dict(model).items()})
            accelerator.save_state(job.again_folder)
        for _ in accelerator.epochs(2):
            for ids in loader:
                step(accelerator, model, optimizer, schedule, ids, result)
                if job.save is not None and accelerator.num_updates == job.until:
                    accelerator.save_state(job.save, blocking=not job.is_behind)
                if accelerator.num_updates == job.until + job.is_behind:  # trains while the save is written
                    return result
        raise AssertionError("the epochs were too short")
    finally:
        if job.save is not None:
            accelerator.wait_for_save()
        accelerator.free_memory()


def step(accelerator: Any, model: Any, optimizer: Any, schedule: Any, ids: torch.Tensor, result: Result) -> None:
    """Make one update, and record its loss and samples."""
    with accelerator.accumulate(model):
        loss = compute_loss(model, ids)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    result.losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    result.seen.append(sorted(accelerator.gather_for_metrics(ids[:, 0] * 37 + ids[:, 1]).tolist()))


def compute_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of predicting the next token."""
    found = model(ids)
    logits = getattr(found, "logits", found)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@dataclass(frozen=True)
class Job:
    """One of the runs that a group of processes makes.

    Attributes:
        layout: Layout of the run.
        load: Checkpoint to resume from, or None to start from scratch.
        save: Path of the checkpoint to save, or None.
        until: Number of updates after which the run saves and ends.
        is_behind: Whether the save is written in the background.
    """

    layout: str
    load: Path | None = None
    save: Path | None = None
    until: int = UPDATES
    is_behind: bool = False

    @property
    def again_folder(self) -> Path:
        """Path of the second checkpoint, to which the loaded state is written."""
        assert self.load is not None
        return self.load.with_name(f"{self.load.name} into {self.layout}")


def _train_all(jobs: Sequence[Job], name: str) -> list[Result]:
    return [train(job, name) for job in jobs]


def run(num_ranks: int, jobs: Sequence[Job], name: str, timeout: float = 300) -> list[Result]:
    """Run the jobs on `num_ranks` processes and return rank 0's results.

    All ranks must return the same losses.

    Raises:
        AssertionError: If ranks have different losses.
    """
    found = run_ranks(_train_all, num_ranks, jobs, name, timeout=timeout)
    for result in found[1:]:
        assert [one.losses for one in result] == [one.losses for one in found[0]], "ranks have different losses"
    return list(found[0])


def measure_difference(result: Result, whole: Result, begin: int = STOP) -> float:
    """Return the largest difference between a run's losses and those of the uninterrupted run.

    Raises:
        AssertionError: If the number of updates or their samples differ.
    """
    there = slice(begin, begin + len(result.losses))
    assert result.seen == whole.seen[there], f"other samples: {result.seen} instead of {whole.seen[there]}"
    return max(abs(one - other) for one, other in zip(result.losses, whole.losses[there], strict=True))


def read_state(folder: Path) -> dict[str, torch.Tensor]:
    """Return the whole weights and optimizer state of a checkpoint."""
    found = dict(read_tensors(folder, verify_checkpoint(folder)))
    return {name: tensor for name, tensor in found.items() if name.startswith(("model/", "optimizer/"))}


def check_loaded(job: Job, result: Result) -> None:
    """Check that saved, loaded and saved-again tensors are equal bit for bit, then remove the second checkpoint.

    Raises:
        AssertionError: If tensors differ.
    """
    assert job.load is not None
    saved, again = read_state(job.load), read_state(job.again_folder)
    assert any("exp_avg_sq" in name for name in saved)
    assert saved.keys() == again.keys(), f"other tensors: {sorted(saved.keys() ^ again.keys())}"
    differing = [name for name, tensor in saved.items() if not torch.equal(tensor, again[name])]
    differing += [name for name, tensor in saved.items()
                  if name.startswith("model/") and not torch.equal(tensor, result.loaded[name.removeprefix("model/0/")])]  # fmt: skip
    assert not differing, f"other values after the load: {differing}"
    shutil.rmtree(job.again_folder)


def get_tolerance(name: str) -> float:
    """Return the tolerance for the losses of a model."""
    return CLOSE_IN_FLOAT32 if name.endswith(FLOAT32) else CLOSE


def reports_other_layout(result: Result) -> bool:
    """Whether the load reported that tensors were split differently."""
    return any(line.startswith("layout ") for line in result.differences)


# -------------------------------------------------------------------- all pairs


def compare_all_pairs(
    folder: Path, cells: Sequence[Cell], name: str, pairs_with: Sequence[str] = ()
) -> dict[tuple[Cell, Cell], float | str]:
    """Return, for each (source, target), the largest difference of a loss or a description of the failure.

    Args:
        folder: Folder for the checkpoints.
        cells: Layouts to save from and to load into.
        name: Name of the model.
        pairs_with: Test only pairs with one of these cells; all pairs if empty.

    Raises:
        AssertionError: If an uninterrupted run differs from one process, or a background save from a blocking one.
    """
    whole = run(1, [Job("ddp")], name)[0]
    assert max(whole.losses) - min(whole.losses) > 0.1, f"it learns nothing: {whole.losses}"
    for num_ranks in sorted({cell.num_ranks for cell in cells}):
        jobs = [Job(cell.layout, None, folder / f"{cell}{' behind' * is_behind}", STOP, is_behind)
                for cell in cells if cell.num_ranks == num_ranks for is_behind in (False, True)]  # fmt: skip
        for job, result in zip(jobs, run(num_ranks, jobs, name, 600), strict=True):
            assert measure_difference(result, whole, 0) < get_tolerance(name), job
    for cell in cells:
        step, behind = read_state(folder / str(cell)), read_state(folder / f"{cell} behind")
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
        for source, job, result in zip(sources, jobs, ran, strict=True):
            found[source, target] = _judge(source, target, job, result, whole)
        print(f"into {target}: {time.monotonic() - began:.0f} s", flush=True)
    return found


def _judge(source: Cell, target: Cell, job: Job, result: Any, whole: Result) -> float | str:
    if isinstance(result, AssertionError):
        return str(result)
    try:
        check_loaded(job, result)
        return measure_difference(result, whole)
    except AssertionError as error:
        return f"{source} -> {target}: {error}"


def main() -> int:
    """Print the matrix, and return 1 if any cell fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", choices=MODELS, default="llama", help="moe: a mixture of experts, with its own layouts"
    )
    parser.add_argument("--only", nargs="*", help="cells such as fsdp@4 and single@1")
    parser.add_argument("--pairs_with", nargs="*", default=(), help="only loads into and out of these cells")
    parser.add_argument("--zero", action="store_true", help="include DeepSpeed's stages; all models use float32")
    args = parser.parse_args()
    name = args.model + FLOAT32 * args.zero
    known = (*(MOE if args.model == "moe" else OWN), *(ENGINES if args.zero else ()))
    cells = [cell for cell in known if not args.only or str(cell) in args.only]
    folder, began = Path(tempfile.mkdtemp(prefix="headway-layouts-")), time.monotonic()
    found = compare_all_pairs(folder, cells, name, args.pairs_with)
    rows = [["from / into", *map(str, cells)]]
    for source in cells:
        values = [found.get((source, target), "-") for target in cells]
        rows.append(
            [
                str(source),
                *(f"{one:.0e}" if isinstance(one, float) else one if one == "-" else "FAILS" for one in values),
            ]
        )
    bad = [one for one in found.values() if isinstance(one, str) or one >= get_tolerance(name)]
    numbers = [one for one in found.values() if not isinstance(one, str)]
    print(f"\nlargest difference of a loss, of {UPDATES - STOP} updates after each load:\n{format_columns(rows)}")
    print(f"{len(found)} loads, {len(bad)} not as promised; largest {max(numbers, default=0):.1e}; "
          f"{time.monotonic() - began:.0f} s")  # fmt: skip
    for one in dict.fromkeys(map(str, bad)):
        print(one)
    if not bad:
        shutil.rmtree(folder)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
