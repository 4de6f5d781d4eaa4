"""Strategies in which several ranks read the same part of the data, with the example strategy `mirror` of examples/own_strategy."""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from headway import Accelerator, DataLoaderConfiguration, Preemption, set_seed
from headway.core.runtime.control_plane.control import Control
from tests.distributed.mirror import make_mirrored_accelerator, write_entry_points
from tests.distributed.ranks import run_ranks


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return write_entry_points(tmp_path / "site")


def make_parts(num_rows: int = 37) -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    x = torch.randn(num_rows, 4)
    return model, TensorDataset(x, x.sum(1, keepdim=True) + 0.1 * torch.randn(num_rows, 1))


# ---------------------------------------------------------------- losses of one process


def collect_results(losses: list[float], norms: list[float], model: nn.Module) -> dict[str, torch.Tensor]:
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"losses": torch.tensor(losses), "norms": torch.tensor(norms), "weights": weights}


def train_by_hand(batch: int, steps: int, epochs: int = 2) -> dict[str, torch.Tensor]:
    model, data = make_parts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    x, y = data.tensors
    losses, norms, size = [], [], batch * steps
    for _ in range(epochs):
        for start in range(0, len(x), size):
            loss = mse_loss(model(x[start : start + size]), y[start : start + size])
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return collect_results(losses, norms, model)


def train_mirrored(folder: Path, steps: int, config: dict[str, Any], epochs: int = 2) -> dict[str, Any]:
    """Train with losses weighted by real rows, accumulation and clipping, in batches of 8 rows over all parts of the data."""
    loading = DataLoaderConfiguration(**config)
    accelerator = make_mirrored_accelerator(
        folder, gradient_accumulation_steps=steps, on_non_finite="skip", dataloader_config=loading
    )
    model, data = make_parts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    size = 8 if loading.split_batches else 8 // accelerator.strategy.data_shard.count
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=size))
    assert loader.total_batch_size == 8
    losses, norms, sums = [], [], [0.0, 0]
    for _ in range(epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                errors = (model(inputs) - targets).square()
                real = errors if loader.mask is None else errors[loader.mask]
                accelerator.backward(real.sum(), weight=len(real), reduction="sum")
                sums = [sums[0] + real.sum().item(), sums[1] + len(real)]
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                    losses.append(float(accelerator.reduce_mean(*sums)))
                    sums = [0.0, 0]
                optimizer.step()
                optimizer.zero_grad()
    assert accelerator.strategy.check(model)
    return collect_results(losses, norms, model)


def train_rows(folder: Path, rows: list[tuple[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [train_mirrored(folder, steps, config) for steps, config in rows]


@pytest.mark.parametrize(
    ("world", "rows"),
    [
        (4, [(2, {"even_batches": False}), (2, {"dispatch_batches": True}), (1, {"split_batches": True}), (2, {})]),
        (2, [(2, {}), (2, {"dispatch_batches": True})]),
    ],
    ids=["two parts of the data", "one part"],
)
def test_mirrored_ranks_match_one_process(package: Path, world: int, rows: list[Any]) -> None:
    for found in run_ranks(train_rows, world, package, rows):
        for (steps, config), one in zip(rows, found):
            for name, values in train_by_hand(8, steps).items():
                torch.testing.assert_close(one[name], values, atol=2e-5, rtol=2e-5, msg=lambda t: f"{config}: {t}")


# ---------------------------------------------------------------- reading, and counting each sample once


class RandomRows(Dataset[Any]):
    """Dataset of numbers, each with random values that the dataset draws from two generators."""

    def __init__(self, length: int, is_batched: bool = False) -> None:
        self.length = length
        self.is_batched = is_batched

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        row = torch.tensor([float(index), torch.rand(()).item(), random.random()])
        return row[None] if self.is_batched else row


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([float(i), torch.rand(()).item(), random.random()]) for i in range(10))


LOADERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "shuffled": (lambda: DataLoader(RandomRows(10), batch_size=2, shuffle=True), {}),
    "shuffled, seedable": (lambda: DataLoader(RandomRows(10), batch_size=2, shuffle=True), {"use_seedable_sampler": True}),
    "uneven": (lambda: DataLoader(RandomRows(10), batch_size=3, shuffle=True), {"even_batches": False}),
    "workers": (lambda: DataLoader(RandomRows(10), batch_size=2, shuffle=True, num_workers=1), {}),
    "own generator": (
        lambda: DataLoader(
            RandomRows(10), batch_size=2,
            sampler=RandomSampler(range(10), generator=torch.Generator().manual_seed(random.randrange(1000))),
        ),
        {},
    ),
    "batched by the dataset": (lambda: DataLoader(RandomRows(10, is_batched=True), batch_size=None, shuffle=True), {}),
    "stream": (lambda: DataLoader(Stream(), batch_size=2), {}),
    "dispatched": (lambda: DataLoader(RandomRows(10), batch_size=2, shuffle=True), {"dispatch_batches": True}),
}  # fmt: skip


def read_all_loaders(folder: Path) -> dict[str, list[Any]]:
    torch.manual_seed(100 + int(os.environ["RANK"]))  # ranks have different seeds before any Accelerator exists
    random.seed(int(os.environ["RANK"]))
    found: dict[str, list[Any]] = {}
    for name, (loader, config) in LOADERS.items():
        accelerator = make_mirrored_accelerator(folder, dataloader_config=DataLoaderConfiguration(**config))
        prepared = accelerator.prepare(loader())
        own, seen, valid = [], [], []
        for _ in range(2):
            for batch in prepared:
                rows = batch.reshape(-1, 3)
                own.append(rows)
                valid.append(accelerator.gather(torch.tensor([prepared.num_valid])).tolist())
                gathered = accelerator.gather_for_metrics(rows)
                seen += gathered[:, 0].tolist()
                assert accelerator.gather(rows[:1]).shape[0] == accelerator.num_processes
        found[name] = [accelerator.strategy.data_shard.index, torch.cat(own).tolist(), seen, valid]
    return found


@pytest.mark.parametrize("world", [4, pytest.param(2, marks=pytest.mark.matrix)])
def test_ranks_of_one_part_read_the_same_samples_and_count_them_once(package: Path, world: int) -> None:
    ranks = run_ranks(read_all_loaders, world, package, timeout=240)
    for name in LOADERS:
        parts: dict[int, Any] = {}
        for rank in ranks:
            index, own, seen, _ = rank[name]
            assert parts.setdefault(index, own) == own, f"{name}: ranks of one part read different samples"
            assert sorted(seen) == sorted([*range(10), *range(10)]), f"{name}: {seen}"
        assert len(parts) == world // 2


def draw_and_reduce(folder: Path) -> list[Any]:
    accelerator = make_mirrored_accelerator(folder)
    set_seed(5, device_specific=True)
    drawn = torch.rand(3).tolist()
    total = float(accelerator.reduce_mean(accelerator.strategy.data_shard.index + 1.0, 1.0))
    gathered = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
    return [drawn, total, gathered, accelerator.strategy.data_group.world_size, accelerator.strategy.data_group.rank]


def test_device_specific_seeds_are_equal_within_a_part_of_the_data(package: Path) -> None:
    first, second, third, fourth = run_ranks(draw_and_reduce, 4, package)
    assert first[0] == second[0] != third[0] == fourth[0]
    assert [each[1:] for each in (first, second, third, fourth)] == [
        [1.5, [0, 1, 2, 3], 2, index] for index in (0, 0, 1, 1)
    ]


# ---------------------------------------------------------------- votes of all ranks


def skip_infinite_loss(folder: Path) -> tuple[int, int, str, bool]:
    accelerator = make_mirrored_accelerator(folder, on_non_finite="skip")
    model, data = make_parts()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = data.tensors
    for update in range(3):
        with accelerator.accumulate(model):
            loss = mse_loss(model(x[:4]), y[:4])
            is_bad = update == 1 and accelerator.process_index == 3
            accelerator.backward(loss * (float("inf") if is_bad else 1.0), weight=4)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.non_finite is not None
    is_alike = accelerator.strategy.check(model)
    return accelerator.num_updates, accelerator.non_finite.num_skipped, accelerator.non_finite.report, is_alike


def test_infinite_loss_on_one_rank_is_skipped_by_all_ranks(package: Path) -> None:
    for num_updates, num_skipped, report, is_alike in run_ranks(skip_infinite_loss, 4, package):
        assert (num_updates, num_skipped, is_alike) == (2, 1, True)
        assert "inf on rank 3" in report
        assert "skipped on all ranks" in report


has = Control.has_key


def has_slowly(control: Control, key: str) -> bool:
    if key.endswith("verdict"):
        time.sleep(0.5)  # long enough for rank 0, which hosts the store, to exit
    return has(control, key)


def stop_at_signal(folder: Path, project: Path) -> tuple[int, bool]:
    if os.environ["RANK"] != "0":
        Control.has_key = has_slowly  # type: ignore[method-assign]
    accelerator = make_mirrored_accelerator(
        folder, preemption=Preemption(exits=False), project_dir=str(project), gradient_accumulation_steps=2
    )
    model, data = make_parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=1))
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates == 3 and accelerator.process_index == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        if accelerator.num_updates == 3:
            accelerator.wait_for_everyone()
        if accelerator.preempted:
            break
    return accelerator.num_updates, accelerator.preempted


def test_signal_on_one_rank_stops_all_ranks_at_one_update(package: Path, tmp_path: Path) -> None:
    found = run_ranks(stop_at_signal, 4, package, tmp_path / "project")
    assert len(set(found)) == 1
    assert found[0][1]
    assert 3 <= found[0][0] < 9


# ---------------------------------------------------------------- checkpoints


def train_and_save(folder: Path | None, where: Path, stop: int | None, resume: bool) -> dict[str, Any]:
    """Train on shuffled data with dropout. With `stop`, save after that update; with `resume`, start from the checkpoint."""
    accelerator = Accelerator(cpu=True) if folder is None else make_mirrored_accelerator(folder)
    set_seed(3)
    model, data = make_parts(40)
    model.append(nn.Dropout(0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    size = 8 // accelerator.strategy.data_shard.count
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=size, shuffle=True))
    differences: list[str] = []
    if resume:
        differences = accelerator.load_state(where).differences
    losses: list[float] = []
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.reduce_mean(loss.item() * len(inputs), len(inputs))))
            if accelerator.num_updates == stop:
                accelerator.save_state(where)
    return {
        "losses": losses[-6:] if not resume else losses[:6],
        "differences": differences,
        "draw": torch.rand(()).item(),
    }


def test_checkpoints_load_in_other_layouts(package: Path, tmp_path: Path) -> None:
    where = tmp_path / "checkpoint"
    whole = run_ranks(train_and_save, 4, package, where, 4, False)
    expected = torch.tensor(whole[0]["losses"])
    for folder, world, differs in ((package, 4, False), (None, 4, True), (package, 2, True)):
        ranks = run_ranks(train_and_save, world, folder, where, None, True)
        for rank, found in enumerate(ranks):
            torch.testing.assert_close(torch.tensor(found["losses"]), expected, atol=2e-5, rtol=2e-5)
            assert bool(found["differences"]) == differs, found["differences"]
            if not differs:
                assert found["draw"] == whole[rank]["draw"]
        if differs:  # RNG states are derived, one for each part of the data
            assert len({found["draw"] for found in ranks}) == (world if folder is None else world // 2)
    # Ranks of one part of the data have the same RNG state.
    assert whole[0]["draw"] == whole[1]["draw"]


# ---------------------------------------------------------------- repeated batches


def train_with_failure(folder: Path) -> dict[str, Any]:
    accelerator = make_mirrored_accelerator(
        folder, "mirrored_replicas", microbatching="auto", dataloader_config=DataLoaderConfiguration(even_batches=False)
    )
    model, data = make_parts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
    losses, norms, failures = [], [], []

    def run(piece: Any) -> torch.Tensor:
        if accelerator.process_index == 3 and accelerator.num_updates == 1 and len(piece[0]) > 2:
            failures.append(len(piece[0]))
            raise torch.OutOfMemoryError("CUDA out of memory. Simulated")
        return mse_loss(model(piece[0]), piece[1])

    for _ in range(2):
        for batch in loader:
            losses.append(accelerator.forward_backward(batch, run).item())
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
    return collect_results(losses, norms, model) | {"failures": len(failures)}


def test_batch_repeated_after_out_of_memory_weights_each_part_once(package: Path) -> None:
    found = run_ranks(train_with_failure, 4, package)
    assert [each.pop("failures") for each in found] == [0, 0, 0, 1]
    for each in found:
        for name, values in train_by_hand(8, 1).items():
            torch.testing.assert_close(each[name], values, atol=2e-5, rtol=2e-5)
