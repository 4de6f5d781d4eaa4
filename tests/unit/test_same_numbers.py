"""Test that the same seed gives the same numbers: a prepared loop on one process equals the plain one bit for bit."""

import random

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from headway import Accelerator, DataLoaderConfiguration

EPOCHS = 3


class Augmented(Dataset):
    """Rows with noise from all three global generators, like an augmentation."""

    def __init__(self, length=37, is_noisy=True):
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randn(length, 4, generator=generator)
        self.is_noisy = is_noisy

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        if self.is_noisy:
            row = row + torch.randn(4) + random.random() + float(numpy.random.rand())
        return row, row.sum()[None]


class RandomStream(IterableDataset):
    """Stream whose workers draw random numbers."""

    def __iter__(self):
        for index in range(20):
            yield torch.full((4,), float(index)) + torch.randn(4), torch.ones(1)


def build_seeded():
    torch.manual_seed(3), random.seed(4), numpy.random.seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(make, accelerator=None, evaluated=None, stop_at=None, folder=None, resumes=False, steps=1):
    """Return each update's loss, all weights, and the next number of each random generator."""
    model, optimizer = build_seeded()
    loader = make()
    if accelerator is not None:
        model, optimizer, loader, evaluated = accelerator.prepare(model, optimizer, loader, evaluated)
    losses, count = [], 0
    if resumes:
        accelerator.load_state(folder)
        count = accelerator.num_updates
    first = 0 if not resumes else loader.epoch
    for _ in range(first, EPOCHS):
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            if accelerator is None:
                loss.backward()
            else:
                with accelerator.accumulate(model):
                    accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            count += 1
            if count == stop_at:
                accelerator.save_state(folder)
                return losses
        if evaluated is not None:
            model.eval()
            with torch.no_grad():
                losses += [torch.nn.functional.mse_loss(model(inputs), targets).item() for inputs, targets in evaluated]
            model.train()
    weights = [value for parameter in model.parameters() for value in parameter.flatten().tolist()]
    return losses + weights + [torch.rand(()).item(), random.random(), float(numpy.random.rand())]


def build_loader(kind, workers=0, **settings):
    settings.setdefault("batch_size", 8)
    settings |= {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    data = Augmented(is_noisy=kind != "quiet")
    n = len(data)
    given = {
        "shuffled": {"shuffle": True},
        "quiet": {"shuffle": True},
        "in order": {},
        "weighted": {"sampler": WeightedRandomSampler([1.0 + i % 3 for i in range(n)], n)},
        "subset": {"sampler": SubsetRandomSampler(range(0, n, 2))},
        "with replacement": {"sampler": RandomSampler(data, replacement=True, num_samples=50)},
        "own generator": {"shuffle": True, "generator": torch.Generator().manual_seed(9)},
        "batch sampler": {"batch_sampler": BatchSampler(RandomSampler(data), 5, False)},
        "unbatched": {"batch_size": None, "shuffle": True},
    }[kind]
    if "batch_sampler" in given:
        del settings["batch_size"]
    return DataLoader(data, **{**settings, **given})


KINDS = [
    "shuffled",
    "in order",
    "weighted",
    "subset",
    "with replacement",
    "own generator",
    "batch sampler",
    "unbatched",
]


@pytest.mark.parametrize("kind", KINDS)
def test_prepared_loop_equals_the_plain_one(kind):
    plain = train(lambda: build_loader(kind), evaluated=build_loader("in order"))
    assert train(lambda: build_loader(kind), Accelerator(cpu=True), build_loader("in order")) == plain


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "settings"), [
    ("shuffled", {}), ("shuffled", {"persistent_workers": True}), ("shuffled", {"drop_last": True}),
    ("weighted", {}), ("own generator", {}), ("unbatched", {}),
])  # fmt: skip
def test_workers_draw_the_numbers_of_the_plain_loop(kind, settings):
    plain = train(lambda: build_loader(kind, 2, **settings))
    assert train(lambda: build_loader(kind, 2, **settings), Accelerator(cpu=True)) == plain


@pytest.mark.slow
def test_workers_of_a_stream_draw_the_same_numbers():
    def make():
        return DataLoader(RandomStream(), batch_size=4, num_workers=2, multiprocessing_context="fork")

    assert train(make, Accelerator(cpu=True)) == train(make)


def test_loaders_read_in_parallel_draw_in_torchs_order():
    def read_both(accelerator=None):
        torch.manual_seed(1)
        loaders = build_loader("quiet"), build_loader("quiet", batch_size=5)
        if accelerator is not None:
            loaders = accelerator.prepare(*loaders)
        return [(a[0].tolist(), b[0].tolist()) for _ in range(2) for a, b in zip(*loaders)]

    assert read_both(Accelerator(cpu=True)) == read_both()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop_at", [2, 5, 7])
def test_resumed_run_continues_with_the_same_numbers(kind, stop_at, tmp_path):
    whole = train(lambda: build_loader(kind))
    begun = train(lambda: build_loader(kind), Accelerator(cpu=True), stop_at=stop_at, folder=tmp_path / "c")
    rest = train(lambda: build_loader(kind), Accelerator(cpu=True), folder=tmp_path / "c", resumes=True)
    assert begun + rest == whole


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"persistent_workers": True}, {"workers": 3, "batch_size": 4}])
@pytest.mark.parametrize("stop_at", [5, *(pytest.param(each, marks=pytest.mark.matrix) for each in (1, 4, 6, 8))])
def test_resumed_run_with_random_workers_continues_with_the_same_numbers(settings, stop_at, tmp_path):
    settings = {"workers": 2, **settings}
    workers = settings.pop("workers")
    whole = train(lambda: build_loader("shuffled", workers, **settings))
    begun = train(lambda: build_loader("shuffled", workers, **settings), Accelerator(cpu=True), stop_at=stop_at,
                  folder=tmp_path / "c")  # fmt: skip
    rest = train(lambda: build_loader("shuffled", workers, **settings), Accelerator(cpu=True), folder=tmp_path / "c",
                 resumes=True)  # fmt: skip
    assert begun + rest == whole


@pytest.mark.slow
def test_run_resumed_twice_in_one_epoch(tmp_path):
    def make():
        return build_loader("shuffled", 2, batch_size=4)

    whole = train(make)
    begun = train(make, Accelerator(cpu=True), stop_at=3, folder=tmp_path / "c")
    more = train(make, Accelerator(cpu=True), stop_at=4, folder=tmp_path / "d", resumes=False)
    assert more[:3] == begun
    again = train(make, Accelerator(cpu=True), stop_at=7, folder=tmp_path / "d", resumes=False)
    assert begun + again[3:] + train(make, Accelerator(cpu=True), folder=tmp_path / "d", resumes=True) == whole


def test_seedable_order_leaves_the_global_generators_unchanged():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(data_seed=1))
    assert accelerator.use_seedable_sampler
    loader = accelerator.prepare(build_loader("quiet"))
    before = torch.get_rng_state()
    list(loader)
    assert torch.equal(torch.get_rng_state(), before)


class CountingStream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(22.0))


@pytest.mark.parametrize("stop_at", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("make", [CountingStream, lambda: list(torch.arange(22.0))])
def test_save_within_a_window_goes_back_to_its_start(make, stop_at, tmp_path):
    def read_batches(accelerator, num_batches=None):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(make(), batch_size=4))
        if num_batches is None:
            accelerator.load_state(tmp_path / "c")
        out = []
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch[:, None]).sum())
            optimizer.step()
            optimizer.zero_grad()
            out.append(batch.tolist())
            if len(out) == num_batches:
                accelerator.save_state(tmp_path / "c")
                return out
        return out

    whole = [batch.tolist() for batch in DataLoader(make(), batch_size=4)]
    assert read_batches(Accelerator(cpu=True, gradient_accumulation_steps=3), stop_at) == whole[:stop_at]
    assert read_batches(Accelerator(cpu=True, gradient_accumulation_steps=3)) == whole[stop_at // 3 * 3 :]
