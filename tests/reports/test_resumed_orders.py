"""Tests of resuming with stateful samplers, data sets and loaders: each epoch yields each sample once.

The expected rows are those of a plain PyTorch loader.
"""

import random
import warnings

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, TensorDataset

from headway import Accelerator, DataLoaderConfiguration, ProjectConfiguration
from headway.errors import CheckpointError, HeadwayWarning
from tests.distributed.ranks import run_ranks

NUM_ROWS, BATCH = 48, 2


class Shuffled(Sampler):
    """A sampler that shuffles with its own generator.

    Args:
        kind: Kind of the generator, one of KINDS.
    """

    def __init__(self, kind):
        self.kind = kind
        bits = {"philox": numpy.random.Philox, "twister": numpy.random.MT19937, "small": numpy.random.SFC64}
        if kind in bits:
            self.rng = numpy.random.Generator(bits[kind](5))
        elif kind == "torch":
            self.rng = torch.Generator().manual_seed(5)
        else:
            makers = {"numpy": numpy.random.default_rng, "legacy": numpy.random.RandomState, "random": random.Random}
            self.rng = makers[kind](5)

    def __len__(self):
        return NUM_ROWS

    def __iter__(self):
        if self.kind == "torch":
            return iter(torch.randperm(NUM_ROWS, generator=self.rng).tolist())
        if self.kind == "random":
            return iter(self.rng.sample(range(NUM_ROWS), NUM_ROWS))
        return iter(self.rng.permutation(NUM_ROWS).tolist())


class Counting(Sampler):
    """A sampler with a different order in each epoch. Its state dict holds the epoch and the position in it.

    Args:
        keeps_place: Whether it continues within the epoch after `load_state_dict`, like samplers for a plain loader.
    """

    def __init__(self, keeps_place):
        self.keeps_place, self.epoch, self.place, self.start = keeps_place, 0, 0, 0

    def __len__(self):
        return NUM_ROWS

    def __iter__(self):
        start, self.start = self.start, 0
        order = numpy.random.default_rng(self.epoch).permutation(NUM_ROWS).tolist()
        for self.place in range(start, NUM_ROWS):
            yield order[self.place]
        self.epoch += 1

    def state_dict(self):
        return {"epoch": self.epoch, "place": self.place + 1}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]
        self.start = state["place"] if self.keeps_place else 0


class Hidden(Sampler):
    """A sampler that draws from a generator that Headway cannot find."""

    def __len__(self):
        return NUM_ROWS

    def __iter__(self):
        return iter(HIDDEN[0].permutation(NUM_ROWS).tolist())


HIDDEN = [numpy.random.default_rng(5)]


class Positioned(IterableDataset):
    """A stream that keeps its position in the epoch.

    Args:
        is_cleared: Whether each pass starts at the first row. Otherwise, it starts at the position.
    """

    def __init__(self, is_cleared):
        self.is_cleared, self.place, self.start = is_cleared, 0, None

    def __iter__(self):
        start = (self.start or 0) if self.is_cleared else self.place
        self.start = None
        for row in range(start, NUM_ROWS):
            self.place = row + 1
            yield row
        if not self.is_cleared:
            self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = self.start = state["place"]


def run(root, make, name, saves=(3, 7, 30), workers=0, registers=None, **config):
    """Read two epochs in runs that save and end after these numbers of batches. Return all rows and the warnings."""
    seen, warned, total, number = [], [], 0, 0
    while True:
        torch.manual_seed(1)
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
        source, stateful = make()
        context = "fork" if workers else None
        loader = accelerator.prepare(DataLoader(**source, num_workers=workers, multiprocessing_context=context))
        if registers:
            accelerator.register_for_checkpointing(stateful)
        folder = f"{root}/{name}"
        if number:
            accelerator.load_state(folder)
        is_saved = False
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            while loader.epoch < 2 and not is_saved:
                for rows in loader:
                    seen += accelerator.gather(rows).flatten().tolist()
                    total += 1
                    if number < len(saves) and total == saves[number]:
                        accelerator.save_state(folder)
                        is_saved = True
                        break
        warned += [str(each.message) for each in caught if issubclass(each.category, HeadwayWarning)]
        accelerator.end_training()
        if not is_saved:
            return seen, warned
        number += 1


def read_plain_epochs(make):
    """Return the rows of two epochs from a plain loader."""
    torch.manual_seed(1)
    source, _ = make()
    loader = DataLoader(**source)
    return [row for _ in range(2) for rows in loader for row in rows.tolist()]


def make_sampler_source(sampler, is_batched=False):
    data = list(range(NUM_ROWS))
    if is_batched:
        return {"dataset": data, "batch_sampler": FixedSizeBatchSampler(sampler)}, sampler
    return {"dataset": data, "batch_size": BATCH, "sampler": sampler}, sampler


class FixedSizeBatchSampler(BatchSampler):
    """Subclass of torch's BatchSampler that takes only a sampler and yields batches of BATCH rows."""

    def __init__(self, sampler):
        super().__init__(sampler, BATCH, drop_last=False)


KINDS = ["numpy", "legacy", "random", "philox", "twister", "small", "torch"]


def run_generators(root):
    return {
        (kind, is_batched): (
            run(root, lambda: make_sampler_source(Shuffled(kind), is_batched), f"{kind}{is_batched}"),
            read_plain_epochs(lambda: make_sampler_source(Shuffled(kind), is_batched)),
        )
        for kind in KINDS
        for is_batched in (False, True)
    }


def check_all(results):
    for kind, ((rows, warned), expected) in results.items():
        assert not warned, kind
        assert rows == expected, kind


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_samplers_with_their_own_generator(world_size, tmp_path):
    for results in run_ranks(run_generators, world_size, str(tmp_path)):
        check_all(results)


def run_stateful_sources(root):
    makers = {
        "sampler": lambda: make_sampler_source(Counting(keeps_place=False)),
        "sampler with a place": lambda: make_sampler_source(Counting(keeps_place=True)),
        "batches": lambda: make_sampler_source(Counting(keeps_place=True), is_batched=True),
        "dataset": lambda: make_dataset_source(is_cleared=False),
        "dataset that is cleared": lambda: make_dataset_source(is_cleared=True),
    }
    return {
        (kind, registers): (run(root, make, f"{kind}{registers}", registers=registers), read_plain_epochs(make))
        for kind, make in makers.items()
        for registers in (True, False)
        if registers or kind in ("sampler", "sampler with a place", "batches")
    }


def make_dataset_source(is_cleared):
    dataset = Positioned(is_cleared)
    return {"dataset": dataset, "batch_size": BATCH}, dataset


@pytest.mark.parametrize("world_size", [1, 2])
def test_samplers_and_datasets_with_their_own_state(world_size, tmp_path):
    for results in run_ranks(run_stateful_sources, world_size, str(tmp_path)):
        check_all(results)


def run_stateful_loaders(root):
    makers = {
        "stream": lambda: ({"dataset": Plain(), "batch_size": BATCH}, None),
        "dataset": lambda: make_dataset_source(is_cleared=False),
        "sampler": lambda: make_sampler_source(Counting(keeps_place=True)),
        "shuffled": lambda: ({"dataset": list(range(NUM_ROWS)), "batch_size": BATCH, "shuffle": True}, None),
    }
    return {
        (kind, workers): (
            run(root, make, f"{kind}{workers}", workers=workers, use_stateful_dataloader=True),
            read_plain_epochs(make),
        )
        for kind, make in makers.items()
        for workers in (0, 1)
    }


class Plain(IterableDataset):
    """A stream without state."""

    def __iter__(self):
        return iter(range(NUM_ROWS))


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_stateful_loaders_resume_repeatedly(world_size, tmp_path):
    for results in run_ranks(run_stateful_loaders, world_size, str(tmp_path)):
        check_all(results)


def run_hidden_generator(root):
    HIDDEN[0] = numpy.random.default_rng(5)
    return run(root, lambda: make_sampler_source(Hidden()), "hidden", saves=(3,))


def test_different_order_after_resuming_warns(tmp_path):
    _, warned = run_ranks(run_hidden_generator, 1, str(tmp_path))[0]
    assert len(warned) == 1
    assert "Hidden gives another order after the resume" in warned[0]


# ---------------------------------------------------------------- loaders that are prepared after the load


def read_loader_prepared_later(root, num_rows):
    """Save in the middle of a loader, and resume with that loader prepared after the load. Return all rows."""
    rows = torch.arange(float(NUM_ROWS))
    seen = []
    for is_resumed in (False, True):
        torch.manual_seed(1)
        accelerator = Accelerator(cpu=True)
        first = accelerator.prepare(DataLoader(rows, batch_size=BATCH))
        data = rows if not is_resumed else torch.arange(float(num_rows))
        later = DataLoader(data, batch_size=BATCH, shuffle=True)
        if not is_resumed:
            later = accelerator.prepare(later)
        else:
            accelerator.load_state(root)
            later = accelerator.prepare(later)
        for step, batch in enumerate(later):
            seen += accelerator.gather(batch).tolist()
            if not is_resumed and step == 4:
                accelerator.save_state(root)
                break
        assert len(list(first)) == NUM_ROWS // BATCH // accelerator.num_processes
        accelerator.end_training()
    return seen


@pytest.mark.parametrize("world_size", [1, 2])
def test_loader_prepared_after_the_load_continues(world_size, tmp_path):
    for seen in run_ranks(read_loader_prepared_later, world_size, str(tmp_path), NUM_ROWS):
        assert sorted(seen) == list(range(NUM_ROWS))


def test_other_data_in_a_loader_prepared_after_the_load_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="had 48 samples when that was saved, and has 40"):
        read_loader_prepared_later(str(tmp_path), 40)


# -------------------------------------------------------------------- another kind of order


def read_with_another_order(folder, shuffles_first, shuffles_later):
    """Resume with another `shuffle`. Return the samples before the save and after resuming, and the warnings."""

    def start(shuffle):
        project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
        accelerator = Accelerator(cpu=True, project_config=project)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = DataLoader(TensorDataset(torch.arange(24.0)[:, None]), batch_size=2, shuffle=shuffle)
        return accelerator, *accelerator.prepare(model, optimizer, loader)

    def train(accelerator, model, optimizer, loader, num_batches):
        seen = []
        for _ in accelerator.epochs(1):
            for (rows,) in loader:
                seen += accelerator.gather_for_metrics(rows).flatten().tolist()
                with accelerator.accumulate(model):
                    accelerator.backward(model(rows).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                if len(seen) == num_batches * 2 * accelerator.num_processes:
                    accelerator.save_state()
                    return seen
        return seen

    accelerator, *parts = start(shuffles_first)
    before = train(accelerator, *parts, num_batches=2)
    accelerator.end_training()
    accelerator, *parts = start(shuffles_later)
    accelerator.resume("latest")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        after = train(accelerator, *parts, num_batches=100)
    accelerator.end_training()
    return before, after, [str(each.message) for each in caught if issubclass(each.category, HeadwayWarning)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_resuming_with_another_kind_of_order_warns(tmp_path, world_size):
    runs = run_ranks(read_with_another_order, world_size, tmp_path / "changed", True, False)
    for _, _, warned in runs:
        assert len(warned) == 1
        assert "and now they are in the order of the data" in warned[0]
    for before, after, warned in run_ranks(read_with_another_order, world_size, tmp_path / "same", True, True):
        assert warned == []
        assert sorted(before + after) == list(range(24))
