"""The same seed gives the same numbers: a prepared loop on one process equals the plain one bit by bit."""

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
    """Rows with noise from all three global generators, as an augmentation would draw it."""

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


class Chunks(IterableDataset):
    """A stream whose workers draw."""

    def __iter__(self):
        for index in range(20):
            yield torch.full((4,), float(index)) + torch.randn(4), torch.ones(1)


def seeded():
    torch.manual_seed(3), random.seed(4), numpy.random.seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(make, accelerator=None, evaluated=None, stop_at=None, folder=None, resumes=False, steps=1):
    """Each update's loss as a float, then all weights and the streams' next numbers."""
    model, optimizer = seeded()
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


def loader_of(kind, workers=0, **settings):
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
def test_a_prepared_loop_equals_the_plain_one(kind):
    plain = train(lambda: loader_of(kind), evaluated=loader_of("in order"))
    assert train(lambda: loader_of(kind), Accelerator(cpu=True), loader_of("in order")) == plain


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "settings"), [
    ("shuffled", {}), ("shuffled", {"persistent_workers": True}), ("shuffled", {"drop_last": True}),
    ("weighted", {}), ("own generator", {}), ("unbatched", {}),
])  # fmt: skip
def test_workers_draw_what_they_draw_for_the_plain_loop(kind, settings):
    plain = train(lambda: loader_of(kind, 2, **settings))
    assert train(lambda: loader_of(kind, 2, **settings), Accelerator(cpu=True)) == plain


@pytest.mark.slow
def test_a_streams_workers_draw_the_same_too():
    def make():
        return DataLoader(Chunks(), batch_size=4, num_workers=2, multiprocessing_context="fork")

    assert train(make, Accelerator(cpu=True)) == train(make)


def test_loaders_read_side_by_side_draw_in_torchs_order():
    def both(accelerator=None):
        torch.manual_seed(1)
        loaders = loader_of("quiet"), loader_of("quiet", batch_size=5)
        if accelerator is not None:
            loaders = accelerator.prepare(*loaders)
        return [(a[0].tolist(), b[0].tolist()) for _ in range(2) for a, b in zip(*loaders)]

    assert both(Accelerator(cpu=True)) == both()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop_at", [2, 5, 7])
def test_a_resumed_run_goes_on_with_the_same_numbers(kind, stop_at, tmp_path):
    whole = train(lambda: loader_of(kind))
    begun = train(lambda: loader_of(kind), Accelerator(cpu=True), stop_at=stop_at, folder=tmp_path / "c")
    rest = train(lambda: loader_of(kind), Accelerator(cpu=True), folder=tmp_path / "c", resumes=True)
    assert begun + rest == whole


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"persistent_workers": True}, {"workers": 3, "batch_size": 4}])
@pytest.mark.parametrize("stop_at", [5, *(pytest.param(each, marks=pytest.mark.matrix) for each in (1, 4, 6, 8))])
def test_so_does_one_whose_workers_draw(settings, stop_at, tmp_path):
    settings = {"workers": 2, **settings}
    workers = settings.pop("workers")
    whole = train(lambda: loader_of("shuffled", workers, **settings))
    begun = train(lambda: loader_of("shuffled", workers, **settings), Accelerator(cpu=True), stop_at=stop_at,
                  folder=tmp_path / "c")  # fmt: skip
    rest = train(lambda: loader_of("shuffled", workers, **settings), Accelerator(cpu=True), folder=tmp_path / "c",
                 resumes=True)  # fmt: skip
    assert begun + rest == whole


@pytest.mark.slow
def test_a_run_that_is_resumed_twice_in_one_pass(tmp_path):
    def make():
        return loader_of("shuffled", 2, batch_size=4)

    whole = train(make)
    begun = train(make, Accelerator(cpu=True), stop_at=3, folder=tmp_path / "c")
    more = train(make, Accelerator(cpu=True), stop_at=4, folder=tmp_path / "d", resumes=False)
    assert more[:3] == begun
    again = train(make, Accelerator(cpu=True), stop_at=7, folder=tmp_path / "d", resumes=False)
    assert begun + again[3:] + train(make, Accelerator(cpu=True), folder=tmp_path / "d", resumes=True) == whole


def test_a_seedable_order_leaves_the_global_streams_alone():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(data_seed=1))
    assert accelerator.use_seedable_sampler
    loader = accelerator.prepare(loader_of("quiet"))
    before = torch.get_rng_state()
    list(loader)
    assert torch.equal(torch.get_rng_state(), before)


class Counted(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(22.0))


@pytest.mark.parametrize("stop_at", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("make", [Counted, lambda: list(torch.arange(22.0))])
def test_a_save_in_mid_window_goes_back_to_the_windows_start(make, stop_at, tmp_path):
    def seen(accelerator, num_batches=None):
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
    assert seen(Accelerator(cpu=True, gradient_accumulation_steps=3), stop_at) == whole[:stop_at]
    assert seen(Accelerator(cpu=True, gradient_accumulation_steps=3)) == whole[stop_at // 3 * 3 :]
