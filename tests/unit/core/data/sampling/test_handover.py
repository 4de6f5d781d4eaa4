"""Epochs of samplers and streams that draw from the global generators never overlap, also while and after they are resumed."""

import itertools
import random

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Sampler, WeightedRandomSampler

from headway import Accelerator, ProjectConfiguration
from headway.core.data.sampling.loader_generator import LoaderGenerator
from headway.core.data.sampling.sampler_order import SamplerOrder

NUM_DRAWN = 150
DRAWS = {
    "torch": lambda: int(torch.randint(1000, ())),
    "python": lambda: random.randrange(1000),
    "numpy": lambda: int(numpy.random.randint(1000)),
}


class DrawsPerIndex(Sampler):
    """Sampler that draws for each index from `late` on. The indices before it are their positions."""

    def __init__(self, source, late=0):
        self.draw, self.late = DRAWS[source], late

    def __len__(self):
        return NUM_DRAWN

    def __iter__(self):
        for position in range(NUM_DRAWN):
            yield position if position < self.late else self.draw()


def read_epochs(sampler, accelerator=None, stop=None, resumes=False, draws=True, num=None):
    """Return the samples of three epochs and random numbers that training drew, or those before batch `stop`."""
    torch.manual_seed(3), random.seed(4), numpy.random.seed(5)
    loader, model = DataLoader(range(1000), batch_size=10, sampler=sampler), torch.nn.Linear(1, 1)
    if accelerator is not None:
        model, loader = accelerator.prepare(model, loader)
        if resumes:
            accelerator.resume("latest")
    read, noise, count = [], [], 0
    for _ in range(3) if accelerator is None else accelerator.epochs(3):
        for batch in itertools.islice(loader, num):
            if accelerator is not None:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch[:, None].float()).mean())
            read += batch.tolist()
            if draws:
                noise.append((torch.rand(()).item(), random.random(), numpy.random.rand()))
            count += 1
            if count == stop:
                accelerator.save_state()
                return read, noise
    return read, [*noise, (torch.rand(()).item(), random.random(), numpy.random.rand())]


def build_accelerator(folder=None):
    project = ProjectConfiguration(
        None if folder is None else str(folder), automatic_checkpoint_naming=folder is not None
    )
    return Accelerator(cpu=True, project_config=project)


@pytest.mark.parametrize("late", [0, 1, 100])
@pytest.mark.parametrize("source", DRAWS)
def test_numbers_equal_a_plain_loop_if_training_draws_nothing(source, late):
    sampler = DrawsPerIndex(source, late)
    assert read_epochs(sampler, build_accelerator(), draws=False) == read_epochs(sampler, draws=False)


@pytest.mark.parametrize("num", [None, 4])
@pytest.mark.parametrize("source", DRAWS)
def test_no_random_number_is_drawn_twice(source, num, monkeypatch):
    numbers = {"torch": torch.rand, "python": random.random, "numpy": numpy.random.rand}[source]
    drawn = []
    monkeypatch.setitem(DRAWS, source, lambda: drawn.append(float(numbers(1) if source == "torch" else numbers())) or 0)
    _, noise = read_epochs(DrawsPerIndex(source), build_accelerator(), num=num)
    drawn += [each[list(DRAWS).index(source)] for each in noise]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize(("source", "late"), [("torch", 0), ("python", 0), ("numpy", 0), ("torch", 100)])
def test_resumed_run_equals_the_uninterrupted_run(source, late, tmp_path):
    whole, noise = read_epochs(DrawsPerIndex(source, late), build_accelerator())
    for stop in (1, 7, 14, 15, 19, 30):
        first = read_epochs(DrawsPerIndex(source, late), build_accelerator(tmp_path / str(stop)), stop)
        rest = read_epochs(DrawsPerIndex(source, late), build_accelerator(tmp_path / str(stop)), resumes=True)
        assert (first[0] + rest[0], first[1] + rest[1]) == (whole, noise), stop


@pytest.mark.parametrize(
    "make", [lambda: WeightedRandomSampler([1.0] * 1000, NUM_DRAWN), lambda: DrawsPerIndex("torch")]
)
@pytest.mark.parametrize("is_private", [True, False])
def test_pass_of_an_older_checkpoint_is_repeated_and_then_left_behind(make, is_private):
    def build(state=None):
        stream = LoaderGenerator(is_private)
        stream.load_state(state)
        return stream, SamplerOrder(make(), 1, False, stream, None, True)

    torch.manual_seed(5)
    _, order = build()
    items = order.draw_order(0)
    begun = [next(items) for _ in range(20)]
    state = {name: value for name, value in order.state(True).items() if name != "handover"}
    whole = begun + list(items)
    # Earlier versions advanced a private stream by one draw, and the global generators by the draws for the first item.
    torch.manual_seed(5)
    older = LoaderGenerator(is_private=True)
    older.draw_seed()
    torch.manual_seed(5)
    next(iter(make()))
    _, resumed = build(older.state() if is_private else None)
    resumed.load_state(state)
    assert list(resumed.draw_order(0)) == whole
    following = list(resumed.draw_order(1))
    assert max(sum(map(int.__eq__, whole[k:], following)) for k in range(20)) < 10
