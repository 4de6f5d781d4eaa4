"""The source files of Headway that one batch passes through, from the loader to the scheduler step (see docs/architecture.md)."""

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
FETCH_FILES = {"data/loader.py", "data/feeds/mapped.py", "data/sampling/shard.py", "checkpoint/resume/progress.py"}
"""Files that fetch a batch. progress.py records where each window starts, for saves inside a window."""
STEP_FILES = {
    "accelerator.py", "training/windows.py", "data/batch_reads.py", "training/loss_policy.py", "training/step.py",
    "training/whole_step.py", "training/guard.py", "training/update_clock.py", "strategies/base.py", "precision/mixed.py",
    "training/prepared/optimizer.py", "training/prepared/scheduler.py",
}  # fmt: skip


@contextmanager
def trace_files() -> Iterator[set[str]]:
    """Collect the paths of Headway's files whose functions are called in the block."""
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


def train_on_batch(accelerator: Accelerator, model: Any, optimizer: Any, batch: Any) -> None:
    """Train on one batch with the loop of the README."""
    inputs, targets = batch
    with accelerator.accumulate(model):
        accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def train_on_batch_with_function(accelerator: Accelerator, model: Any, optimizer: Any, batch: Any) -> None:
    """Train on one batch with `forward_backward`, which takes the loss as a function."""
    accelerator.forward_backward(batch, lambda piece: torch.nn.functional.mse_loss(model(piece[0]), piece[1]))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def trace_batch(learn: Callable[..., None] = train_on_batch, prepare: Callable[[Accelerator], Any] = lambda accelerator: None,
        **options: Any) -> tuple[set[str], set[str]]:  # fmt: skip
    """Train for six batches and return the files that the last batch passes through.

    Returns two sets: the files entered while the batch is fetched, and those entered until the scheduler step ends.
    """
    accelerator = Accelerator(cpu=True, **options)
    prepare(accelerator)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.ones(16, 4), torch.ones(16, 1)), batch_size=2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    batches = iter(loader)
    for _ in range(6):
        with trace_files() as fetched:
            batch = next(batches)
        with trace_files() as passed:
            learn(accelerator, model, optimizer, batch)
            schedule.step()
            optimizer.zero_grad()
    batches.close()  # type: ignore[attr-defined]
    return fetched, passed


def test_default_options_use_twelve_files() -> None:
    fetched, passed = trace_batch()
    assert passed == STEP_FILES
    assert len(passed) <= 12
    assert fetched <= FETCH_FILES


@pytest.mark.parametrize(
    ("options", "added"),
    [
        (
            {"on_non_finite": "skip"},
            {"training/checks/finite.py", "training/checks/window_records.py", "training/prepared/objects.py"},
        ),
        ({"mixed_precision": "bf16"}, {"training/prepared/model.py"}),
        ({"mixed_precision": "fp16"}, {"training/prepared/model.py", "precision/fp16.py"}),
        ({"gradient_accumulation_steps": 3}, set()),
    ],
)
def test_feature_adds_only_its_own_files(options: dict[str, Any], added: set[str]) -> None:
    _, passed = trace_batch(**options)
    assert passed - STEP_FILES <= added
    assert added <= passed


def test_throughput_meter_adds_only_its_own_files() -> None:
    fetched, passed = trace_batch(prepare=lambda accelerator: accelerator.throughput)
    assert (fetched | passed) - STEP_FILES - FETCH_FILES == {
        "extras/throughput.py",
        "extras/lap_clock.py",
        "extras/flop_count.py",
        "extras/stragglers.py",
    }


def test_forward_backward_adds_one_file() -> None:
    _, passed = trace_batch(train_on_batch_with_function)
    assert passed - STEP_FILES == {"training/task.py"}


def test_automatic_microbatching_adds_only_its_own_files() -> None:
    _, passed = trace_batch(train_on_batch_with_function, microbatching="auto")
    added = {name for name in passed - STEP_FILES if not name.startswith("extras/replay/")}
    # The loader counts the rows to split. For a replay, the registry, the strategy, the count of tokens and the RNG states
    # restore their state. Ranks vote through the checked collectives.
    assert added <= {"data/loader.py", "training/task.py", "training/prepared/objects.py", "strategies/replay_protocol.py",
                     "training/seen_data.py",
                     "runtime/collectives/tree.py", "runtime/collectives/checked.py", "runtime/seed.py"}  # fmt: skip
