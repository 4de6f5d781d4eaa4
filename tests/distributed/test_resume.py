"""A resumed run is the uninterrupted one: losses bit for bit on the same world, samples in order on another."""

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


class Noisy(Dataset):
    """Augments with all three global generators, as users' transforms do."""

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


def build(folder, *, steps=1, batch=3, workers=0, precision="no", **project):
    set_seed(7)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    loader = DataLoader(
        Noisy(),
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
    """Returns (loss of each micro-batch, sample numbers in global order, final weights); saves at micro-batches."""
    accelerator, model, optimizer, loader, scheduler = build(folder, **settings)
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


def exact(root, settings, stop_after):
    whole, _, weights, _ = train(f"{root}/whole", **settings)
    first, _, _, _ = train(f"{root}/cut", stop_after, {stop_after}, **settings)
    rest, _, resumed, _ = train(f"{root}/cut", resume=True, **settings)
    begun = len(whole) - len(rest)
    assert first == whole[:stop_after]
    assert rest == whole[begun:], (begun, stop_after)
    assert torch.equal(weights, resumed)
    return begun


def all_exact(root):
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
        begun[name] = (exact(f"{root}/{name}", settings, stop_after), stop_after)
    return begun


@pytest.mark.on_device
@pytest.mark.parametrize("world_size", [1, 2])
def test_resumed_losses_are_bit_equal(world_size, tmp_path):
    begun = run_ranks(all_exact, world_size, str(tmp_path))[0]
    for name, (where, stopped) in begun.items():
        assert where == (4 if name == "mid window" else stopped), name


def half(root):
    """Half of a run on any world; the other half of the same run, on this one."""
    return train(f"{root}/cut", 5, {5})


def other_half(root, batch=3, stop_after=None, resume_from="cut"):
    """On with it; a run that stops has saved, so that what comes next goes on from there."""
    losses, seen, weights, restored = train(f"{root}/{resume_from}", stop_after, {stop_after}, resume=True, batch=batch)
    return losses, seen, weights, restored.differences


def whole(root):
    return train(f"{root}/whole")


@pytest.mark.on_device
def test_another_world_sees_the_same_samples_in_the_same_order(tmp_path):
    _, expected, _, _ = run_ranks(whole, 2, str(tmp_path))[0]
    _, first, _, _ = run_ranks(half, 2, str(tmp_path))[0]
    assert first == expected[:30]
    for world_size, batch in ((1, 3), (3, 2)):
        (_, rest, _, told), *others = run_ranks(other_half, world_size, str(tmp_path), batch)
        assert [seen for _, seen, _, _ in others] == [rest] * (world_size - 1)
        assert first + rest == expected
        assert told[0] == f"world 2 -> {world_size}; RNG states are derived from (seed, update, rank)"
        assert told[1:] == (["accumulation 1 -> 2 to keep the global batch of 6"] if world_size == 1 else [])


SIZE = 5  # 2 ranks x 5 samples x 4 micro-batches: no whole number of steps of 3 ranks makes 40


class Plain(Dataset):
    def __len__(self):
        return 106

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(6, generator=generator)
        return index, x, x.sum()


class Streamed(IterableDataset):
    def __iter__(self):
        return (Plain()[index] for index in range(106))


def ragged(root, stop_after, kind):
    """(samples and weights after each update, differences), of a run that stops after so many updates, saved."""
    set_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 40)
    loader = (
        DataLoader(Streamed(), batch_size=SIZE) if kind == "stream"
        else DataLoader(Plain(), batch_size=SIZE, shuffle=True, drop_last=kind == "drop")
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


def both_ragged(root):
    """The whole run, and the beginning of one."""
    return {kind: (ragged(f"{root}/{kind}/whole", None, kind), ragged(f"{root}/{kind}/cut", 2, kind)) for kind in KINDS}


def rest_ragged(root, stop_after):
    return {kind: ragged(f"{root}/{kind}/cut", stop_after, kind) for kind in KINDS}


def check_same(kind, whole, parts):
    found = [update for part in parts for update in part]
    assert [seen for seen, _, _ in found] == [seen for seen, _, _ in whole], kind
    for (_, wanted, rate), (_, weights, other) in zip(whole, found):
        assert torch.allclose(wanted, weights, atol=1e-6), kind
        assert abs(rate - other) < 1e-9, kind


@pytest.mark.on_device
def test_a_global_batch_that_does_not_divide_is_split_raggedly(tmp_path):
    begun = run_ranks(both_ragged, 2, str(tmp_path))[0]
    # On three ranks, three again as after a kill, and one.
    rest = [run_ranks(rest_ragged, world, str(tmp_path), stop)[0] for world, stop in [(3, 4), (3, 5), (1, None)]]
    for kind in KINDS:
        (whole, _), first = begun[kind]
        parts = [first, *(each[kind] for each in rest)]
        check_same(kind, whole, [updates for updates, _ in parts])
        told = [differences for _, differences in parts]
        assert told[1][-1] == "the global batch of 40 samples is split unevenly among the ranks"
        assert told[2] == told[1][-1:]
        assert told[3][0].startswith("world 3 -> 1")
        assert any("to keep the global batch of 40" in line for line in told[3])


@pytest.mark.matrix
def test_a_killed_run_that_is_restarted_ends_as_if_nothing_had_happened(tmp_path):
    body = (Path(__file__).parents[2] / "examples" / "by_feature" / "checkpointing.py").read_text()
    kill = """
            if accelerator.num_updates == 70 and accelerator.process_index == 1 and KILLS:
                import os, signal
                if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                    os.kill(os.getpid(), signal.SIGKILL)
"""
    mark = "            if accelerator.num_updates % 20 == 0:"
    assert mark in body
    told = []
    for kills in ("False", "True"):
        folder = tmp_path / kills
        folder.mkdir()
        ran = launch(
            folder, body.replace(mark, kill.replace("KILLS", kills) + mark), "-n", "2", "--cpu", "--max_restarts", "1"
        )
        assert ran.returncode == 0, ran.stderr
        assert ("SIGKILL" in ran.stderr) == (kills == "True")
        told.append([line for line in ran.stdout.splitlines() if line.startswith("epoch")])
    whole, killed = told
    assert len(whole) == 3
    assert killed[-1] == whole[-1]
    assert set(killed) == set(whole)


def split(folder, stop_after=None):
    """The learning rate of each update, of a schedule that is counted in updates because batches are split."""
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
def test_a_schedule_under_split_batches_does_not_count_processes(tmp_path):
    whole = [1.0] * 4 + [0.5] * 4 + [0.25] * 4
    assert run_ranks(split, 2, str(tmp_path), 2)[0] == whole[:2]
    assert run_ranks(split, 3, str(tmp_path), 6)[0] == whole[2:6]
    assert run_ranks(split, 1, str(tmp_path))[0] == whole[6:]
