"""A resumed run matches an uninterrupted one: losses exactly on the same world size, sample order on another."""

import os
from pathlib import Path

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from headway import Accelerator, DataLoaderConfiguration, ProjectConfiguration, set_seed
from tests.devices import ON_CPU
from tests.distributed.ranks import run_ranks
from tests.distributed.test_launch import launch

NUM_SAMPLES, NUM_EPOCHS = 36, 3


class NoisyRows(Dataset):
    """Dataset that augments samples with torch's and NumPy's global generators, as user transforms do."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(6, generator=generator) + 0.1 * torch.randn(6) + 0.1 * float(numpy.random.rand())
        return index, x, x.sum()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
        )

    def forward(self, x):
        return self.body(x).squeeze(1)


def prepare_training(folder, *, steps=1, batch=3, workers=0, precision="no", **project):
    set_seed(7)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    loader = DataLoader(
        NoisyRows(),
        batch_size=batch,
        shuffle=True,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, **project)
    accelerator = Accelerator(
        cpu=ON_CPU, gradient_accumulation_steps=steps, project_config=project, mixed_precision=precision
    )
    return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler)


def train(folder, stop_after=None, save_at=(), resume=False, blocking=True, **settings):
    """Train, and save after the micro-batches in `save_at`.

    Returns:
        The loss of each micro-batch, the sample numbers in global order, the final weights, and the result of `resume`.
    """
    accelerator, model, optimizer, loader, scheduler = prepare_training(folder, **settings)
    restored = accelerator.resume("latest") if resume else None
    if restored is None:
        set_seed(11, device_specific=True)
    losses, seen, count = [], [], 0
    for _ in accelerator.epochs(NUM_EPOCHS):
        for index, x, y in loader:
            with accelerator.accumulate(model):
                loss = (model(x) - y).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            seen += accelerator.gather_for_metrics(index).tolist()
            count += 1
            if count in save_at:
                accelerator.save_state(blocking=blocking)
            if count == stop_after:
                accelerator.wait_for_save()
                return losses, seen, None, restored
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return losses, seen, weights, restored


def compare_resumed_run(root, settings, stop_after):
    whole, _, weights, _ = train(f"{root}/whole", **settings)
    first, _, _, _ = train(f"{root}/cut", stop_after, {stop_after}, **settings)
    rest, _, resumed, _ = train(f"{root}/cut", resume=True, **settings)
    begun = len(whole) - len(rest)
    assert first == whole[:stop_after]
    assert rest == whole[begun:], (begun, stop_after)
    assert torch.equal(weights, resumed)
    return begun


def compare_all_settings(root):
    per_epoch = NUM_SAMPLES // (3 * int(os.environ["WORLD_SIZE"]))
    begun = {}
    for name, settings, stop_after in [
        ("middle", {}, 4),
        ("end of epoch", {}, per_epoch),
        ("second epoch", {"workers": 2}, per_epoch + 2),
        ("window's end", {"steps": 2}, 4),
        ("mid window", {"steps": 2}, 5),
        ("bf16 behind the loop", {"precision": "bf16", "blocking": False}, 3),
        ("fp16", {"precision": "fp16"}, 3),
    ]:
        begun[name] = (compare_resumed_run(f"{root}/{name}", settings, stop_after), stop_after)
    return begun


@pytest.mark.on_device
@pytest.mark.parametrize("world_size", [1, 2])
def test_resumed_losses_are_bit_for_bit_equal(world_size, tmp_path):
    begun = run_ranks(compare_all_settings, world_size, str(tmp_path))[0]
    for name, (where, stopped) in begun.items():
        assert where == (4 if name == "mid window" else stopped), name


def train_first_half(root):
    """Train the first five batches of a run, and save."""
    return train(f"{root}/cut", 5, {5})


def train_rest(root, batch=3, stop_after=None, resume_from="cut"):
    """Continue the run. With `stop_after`, stop and save, so that another run can continue."""
    losses, seen, weights, restored = train(f"{root}/{resume_from}", stop_after, {stop_after}, resume=True, batch=batch)
    return losses, seen, weights, restored.differences


def train_whole(root):
    return train(f"{root}/whole")


@pytest.mark.on_device
def test_other_world_size_sees_the_same_samples_in_order(tmp_path):
    _, expected, _, _ = run_ranks(train_whole, 2, str(tmp_path))[0]
    _, first, _, _ = run_ranks(train_first_half, 2, str(tmp_path))[0]
    assert first == expected[:30]
    for world_size, batch in ((1, 3), (3, 2)):
        (_, rest, _, differences), *others = run_ranks(train_rest, world_size, str(tmp_path), batch)
        assert [seen for _, seen, _, _ in others] == [rest] * (world_size - 1)
        assert first + rest == expected
        assert differences[0] == f"world size 2 -> {world_size}; RNG states are derived from (seed, update, rank)"
        assert differences[1:] == (["accumulation 1 -> 2 to keep the global batch of 6"] if world_size == 1 else [])


SIZE = 5  # 2 ranks x 5 samples x 4 micro-batches = 40, which no whole number of steps on 3 ranks makes


class PlainRows(Dataset):
    def __len__(self):
        return 106

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(6, generator=generator)
        return index, x, x.sum()


class Streamed(IterableDataset):
    def __iter__(self):
        return (PlainRows()[index] for index in range(106))


def train_ragged(root, stop_after, kind):
    """Train until update `stop_after`, and save. Return samples, weights and rate of each update, and the differences."""
    set_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 40)
    loader = (
        DataLoader(Streamed(), batch_size=SIZE) if kind == "stream"
        else DataLoader(PlainRows(), batch_size=SIZE, shuffle=True, drop_last=kind == "drop")
    )  # fmt: skip
    loading = DataLoaderConfiguration(dispatch_batches=kind == "dispatch", even_batches=False)
    project = ProjectConfiguration(root, automatic_checkpoint_naming=True)
    accelerator = Accelerator(
        cpu=ON_CPU, gradient_accumulation_steps=4, dataloader_config=loading, project_config=project
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    restored = accelerator.resume("latest")
    updates, seen = [], []
    for _ in accelerator.epochs(3):
        for index, x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(x).squeeze(1) - y).square().mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen += accelerator.gather_for_metrics(index).tolist()
            if accelerator.sync_gradients:
                rate = optimizer.param_groups[0]["lr"]
                updates.append((seen, torch.cat([p.detach().flatten() for p in model.parameters()]), rate))
                seen = []
                if accelerator.num_updates == stop_after:
                    accelerator.save_state()
                    return updates, restored and restored.differences
    return updates, restored and restored.differences


KINDS = ("map", "drop", "stream", "dispatch")


def train_whole_and_start(root):
    """Train a whole run and the beginning of another, for each kind of loader."""
    return {
        kind: (train_ragged(f"{root}/{kind}/whole", None, kind), train_ragged(f"{root}/{kind}/cut", 2, kind))
        for kind in KINDS
    }


def train_ragged_rest(root, stop_after):
    return {kind: train_ragged(f"{root}/{kind}/cut", stop_after, kind) for kind in KINDS}


def check_equal(kind, whole, parts):
    found = [update for part in parts for update in part]
    assert [seen for seen, _, _ in found] == [seen for seen, _, _ in whole], kind
    for (_, expected, rate), (_, weights, other) in zip(whole, found):
        assert torch.allclose(expected, weights, atol=1e-6), kind
        assert abs(rate - other) < 1e-9, kind


@pytest.mark.on_device
def test_indivisible_global_batch_is_split_unevenly(tmp_path):
    begun = run_ranks(train_whole_and_start, 2, str(tmp_path))[0]
    # On three ranks, on three again (as after a kill), and on one.
    rest = [run_ranks(train_ragged_rest, world, str(tmp_path), stop)[0] for world, stop in [(3, 4), (3, 5), (1, None)]]
    for kind in KINDS:
        (whole, _), first = begun[kind]
        parts = [first, *(each[kind] for each in rest)]
        check_equal(kind, whole, [updates for updates, _ in parts])
        differences = [each for _, each in parts]
        assert differences[1][-1] == "the global batch of 40 samples is split unevenly among the ranks"
        assert differences[2] == differences[1][-1:]
        assert differences[3][0].startswith("world size 3 -> 1")
        assert any("to keep the global batch of 40" in line for line in differences[3])


@pytest.mark.matrix
def test_killed_and_restarted_run_matches_uninterrupted_run(tmp_path):
    body = (Path(__file__).parents[2] / "examples" / "by_feature" / "checkpointing.py").read_text()
    kill = """
            if accelerator.num_updates == 70 and accelerator.process_index == 1 and KILLS:
                import os, signal
                if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                    os.kill(os.getpid(), signal.SIGKILL)
"""
    mark = "            if accelerator.num_updates % 20 == 0:"
    assert mark in body
    differences = []
    for kills in ("False", "True"):
        folder = tmp_path / kills
        folder.mkdir()
        result = launch(
            folder, body.replace(mark, kill.replace("KILLS", kills) + mark), "-n", "2", "--cpu", "--max_restarts", "1"
        )
        assert result.returncode == 0, result.stderr
        assert ("SIGKILL" in result.stderr) == (kills == "True")
        differences.append([line for line in result.stdout.splitlines() if line.startswith("epoch")])
    whole, killed = differences
    assert len(whole) == 3
    assert killed[-1] == whole[-1]
    assert set(killed) == set(whole)


def trace_rates(folder, stop_after=None):
    """Return the learning rate of each update. With split batches, the schedule counts updates."""
    set_seed(7)
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    loader = DataLoader(torch.randn(24, 6), batch_size=6)
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=ON_CPU, split_batches=True, project_config=project)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.resume("latest")
    rates = []
    for _ in accelerator.epochs(3):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                rates.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.num_updates == stop_after:
                accelerator.save_state()
                return rates
    return rates


@pytest.mark.on_device
def test_schedule_with_split_batches_does_not_depend_on_processes(tmp_path):
    whole = [1.0] * 4 + [0.5] * 4 + [0.25] * 4
    assert run_ranks(trace_rates, 2, str(tmp_path), 2)[0] == whole[:2]
    assert run_ranks(trace_rates, 3, str(tmp_path), 6)[0] == whole[2:6]
    assert run_ranks(trace_rates, 1, str(tmp_path))[0] == whole[6:]
