"""Resumed runs over samplers, datasets and loaders that keep a state of their own: each sample comes once in each epoch.

The expected rows are those that plain torch gives for the same loader.
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
    """Shuffles by a generator of its own.

    Args:
        kind: of generator.
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
    """Another order each epoch, by a count of its own, which `state_dict` holds; and the place in the epoch, if asked to.

    Args:
        keeps_place: go on within the epoch after `load_state_dict`, as samplers for a plain loader do.
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
    """Draws from a generator that nobody can find."""

    def __len__(self):
        return NUM_ROWS

    def __iter__(self):
        return iter(HIDDEN[0].permutation(NUM_ROWS).tolist())


HIDDEN = [numpy.random.default_rng(5)]


class Positioned(IterableDataset):
    """Keeps its place in the epoch.

    Args:
        is_cleared: an epoch begins at the first row, whatever the place; False: where the place is.
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
    """Rows of two epochs, read by runs that save after so many batches in all, and end; and where a warning came."""
    seen, told, total, number = [], [], 0, 0
    while True:
        torch.manual_seed(1)
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
        source, own = make()
        context = "fork" if workers else None
        loader = accelerator.prepare(DataLoader(**source, num_workers=workers, multiprocessing_context=context))
        if registers:
            accelerator.register_for_checkpointing(own)
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
        told += [str(each.message) for each in caught if issubclass(each.category, HeadwayWarning)]
        accelerator.end_training()
        if not is_saved:
            return seen, told
        number += 1


def plain_epochs(make):
    """Rows of two epochs in a plain loader."""
    torch.manual_seed(1)
    source, _ = make()
    loader = DataLoader(**source)
    return [row for _ in range(2) for rows in loader for row in rows.tolist()]


def with_sampler(sampler, is_batched=False):
    data = list(range(NUM_ROWS))
    if is_batched:
        return {"dataset": data, "batch_sampler": TwoByTwo(sampler)}, sampler
    return {"dataset": data, "batch_size": BATCH, "sampler": sampler}, sampler


class TwoByTwo(BatchSampler):
    """A batch sampler of a user's."""

    def __init__(self, sampler):
        super().__init__(sampler, BATCH, drop_last=False)


KINDS = ["numpy", "legacy", "random", "philox", "twister", "small", "torch"]


def with_generators(root):
    return {
        (kind, is_batched): (
            run(root, lambda: with_sampler(Shuffled(kind), is_batched), f"{kind}{is_batched}"),
            plain_epochs(lambda: with_sampler(Shuffled(kind), is_batched)),
        )
        for kind in KINDS
        for is_batched in (False, True)
    }


def check_all(told):
    for kind, ((seen, warned), expected) in told.items():
        assert not warned, kind
        assert seen == expected, kind


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_samplers_with_a_generator_of_their_own(world_size, tmp_path):
    for told in run_ranks(with_generators, world_size, str(tmp_path)):
        check_all(told)


def with_states(root):
    makers = {
        "sampler": lambda: with_sampler(Counting(keeps_place=False)),
        "sampler with a place": lambda: with_sampler(Counting(keeps_place=True)),
        "batches": lambda: with_sampler(Counting(keeps_place=True), is_batched=True),
        "dataset": lambda: with_dataset(is_cleared=False),
        "dataset that is cleared": lambda: with_dataset(is_cleared=True),
    }
    return {
        (kind, registers): (run(root, make, f"{kind}{registers}", registers=registers), plain_epochs(make))
        for kind, make in makers.items()
        for registers in (True, False)
        if registers or kind in ("sampler", "sampler with a place", "batches")
    }


def with_dataset(is_cleared):
    dataset = Positioned(is_cleared)
    return {"dataset": dataset, "batch_size": BATCH}, dataset


@pytest.mark.parametrize("world_size", [1, 2])
def test_samplers_and_datasets_with_a_state_of_their_own(world_size, tmp_path):
    for told in run_ranks(with_states, world_size, str(tmp_path)):
        check_all(told)


def with_torchdata(root):
    makers = {
        "stream": lambda: ({"dataset": Plain(), "batch_size": BATCH}, None),
        "dataset": lambda: with_dataset(is_cleared=False),
        "sampler": lambda: with_sampler(Counting(keeps_place=True)),
        "shuffled": lambda: ({"dataset": list(range(NUM_ROWS)), "batch_size": BATCH, "shuffle": True}, None),
    }
    return {
        (kind, workers): (
            run(root, make, f"{kind}{workers}", workers=workers, use_stateful_dataloader=True),
            plain_epochs(make),
        )
        for kind, make in makers.items()
        for workers in (0, 1)
    }


class Plain(IterableDataset):
    """Keeps nothing."""

    def __iter__(self):
        return iter(range(NUM_ROWS))


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_stateful_loaders_are_resumed_again_and_again(world_size, tmp_path):
    for told in run_ranks(with_torchdata, world_size, str(tmp_path)):
        check_all(told)


def with_a_hidden_generator(root):
    HIDDEN[0] = numpy.random.default_rng(5)
    return run(root, lambda: with_sampler(Hidden()), "hidden", saves=(3,))


def test_an_order_that_is_another_one_after_the_resume_is_told(tmp_path):
    _, told = run_ranks(with_a_hidden_generator, 1, str(tmp_path))[0]
    assert len(told) == 1
    assert "Hidden gives another order after the resume" in told[0]


# ---------------------------------------------------------------- loaders that are prepared after the load


def prepared_later(root, num_rows):
    """Rows of a second loader that is prepared after the load, of a run that was saved in the middle of it."""
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
def test_a_loader_that_is_prepared_after_the_load_goes_on(world_size, tmp_path):
    for seen in run_ranks(prepared_later, world_size, str(tmp_path), NUM_ROWS):
        assert sorted(seen) == list(range(NUM_ROWS))


def test_other_data_in_a_loader_that_is_prepared_after_the_load_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="had 48 samples when that was saved, and has 40"):
        prepared_later(str(tmp_path), 40)


# -------------------------------------------------------------------- another kind of order


def read_with_another_order(folder, shuffles_first, shuffles_later):
    """Return the samples before the save and after the resume, with another `shuffle` there, and the warnings of the resume."""

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
def test_a_resume_with_another_kind_of_order_is_warned_about(tmp_path, world_size):
    found = run_ranks(read_with_another_order, world_size, tmp_path / "changed", True, False)
    for _, _, told in found:
        assert len(told) == 1
        assert "and now they are in the order of the data" in told[0]
    for before, after, told in run_ranks(read_with_another_order, world_size, tmp_path / "same", True, True):
        assert told == []
        assert sorted(before + after) == list(range(24))
