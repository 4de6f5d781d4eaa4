"""A batch's way: how many files of Headway it passes, from the loader to the tick of the schedule. docs/architecture.md draws it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import headway
from headway import Accelerator

SOURCE = Path(headway.__file__).parent
FETCH = {"data/loader.py", "data/feeds/mapped.py", "data/sampling/shard.py", "checkpoint/resume/progress.py"}
"""The loader, what it reads from, how rounds are cut; where a window begins is noted for a save in its middle."""
WAY = {
    "accelerator.py", "training/windows.py", "training/step.py", "strategies/base.py", "precision/mixed.py",
    "training/prepared/optimizer.py", "training/prepared/scheduler.py",
}  # fmt: skip


@contextmanager
def entered() -> Iterator[set[str]]:
    """The files of Headway whose functions are called in the block."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SOURCE):
            found.add(path.relative_to(SOURCE).as_posix().removeprefix("core/"))

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def by_hand(accelerator: Accelerator, model: Any, optimizer: Any, batch: Any) -> None:
    """One micro-batch, as the README has it."""
    inputs, targets = batch
    with accelerator.accumulate(model):
        accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def as_function(accelerator: Accelerator, model: Any, optimizer: Any, batch: Any) -> None:
    """The same with the batch held as a function."""
    accelerator.forward_backward(batch, lambda piece: torch.nn.functional.mse_loss(model(piece[0]), piece[1]))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def way(learn: Callable[..., None] = by_hand, prepare: Callable[[Accelerator], Any] = lambda accelerator: None,
        **options: Any) -> tuple[set[str], set[str]]:  # fmt: skip
    """(the files that a fetch enters, those from there to the end of the scheduler's step), of the sixth batch."""
    accelerator = Accelerator(cpu=True, **options)
    prepare(accelerator)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.ones(16, 4), torch.ones(16, 1)), batch_size=2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    batches = iter(loader)
    for _ in range(6):
        with entered() as fetched:
            batch = next(batches)
        with entered() as passed:
            learn(accelerator, model, optimizer, batch)
            schedule.step()
            optimizer.zero_grad()
    batches.close()  # type: ignore[attr-defined]
    return fetched, passed


def test_everything_off() -> None:
    fetched, passed = way()
    assert passed == WAY
    assert len(passed) <= 7
    assert fetched <= FETCH


@pytest.mark.parametrize(
    ("options", "added"),
    [
        ({"on_non_finite": "skip"}, {"training/checks/finite.py", "training/prepared/objects.py"}),
        ({"mixed_precision": "bf16"}, {"training/prepared/model.py"}),
        ({"mixed_precision": "fp16"}, {"training/prepared/model.py", "precision/fp16.py"}),
        ({"gradient_accumulation_steps": 3}, set()),
    ],
)
def test_a_feature_adds_its_own_file(options: dict[str, Any], added: set[str]) -> None:
    _, passed = way(**options)
    assert passed - WAY <= added
    assert added <= passed


def test_the_meter_adds_its_room() -> None:
    fetched, passed = way(prepare=lambda accelerator: accelerator.throughput)
    assert (fetched | passed) - WAY - FETCH == {"extras/throughput.py", "extras/stragglers.py"}


def test_a_batch_as_a_function_adds_one() -> None:
    _, passed = way(as_function)
    assert passed - WAY == {"training/task.py"}


def test_pieces_stay_in_their_room() -> None:
    _, passed = way(as_function, microbatching="auto")
    added = {name for name in passed - WAY if not name.startswith("extras/replay/")}
    # The loader counts the rows to cut. What goes back is asked of its owners: the registry, the strategy, the RNG states;
    # a vote passes checked collectives.
    assert added <= {"data/loader.py", "training/task.py", "training/prepared/objects.py", "strategies/replay_protocol.py",
                     "runtime/collectives/tree.py", "runtime/collectives/checked.py", "runtime/seed.py"}  # fmt: skip
