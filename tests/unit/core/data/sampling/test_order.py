"""Test sample orders: functions of seed and epoch, torch's own orders, resumed orders, and agreement between ranks."""

import random

import numpy
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from headway.core.config.run import DataLoaderConfiguration
from headway.core.data.loading_rules import LoadingRules, RandomSource
from headway.core.data.sampling.loader_generator import LoaderGenerator
from headway.core.data.sampling.order import DrawnOrder, PureOrder, draw_permutation
from headway.core.data.sampling.sampler_order import SamplerOrder
from headway.core.data.sampling.shard import SampleSplit
from headway.core.runtime.seed import mix_seed
from tests.unit.core.data.fakes import prepare


def make_order(sampler, seed=1, is_seedable=True, broadcast=None, is_synchronized=True):
    return SamplerOrder(sampler, seed, is_seedable, LoaderGenerator(), broadcast, is_synchronized)


class Shuffling(Sampler):
    """Sampler that draws from the global generator named by `source`."""

    def __init__(self, length, source):
        self.length, self.source = length, source

    def __len__(self):
        return self.length

    def __iter__(self):
        for _ in range(self.length):
            if self.source == "torch":
                yield int(torch.randint(1000, ()))
            elif self.source == "python":
                yield random.randrange(1000)
            else:
                yield int(numpy.random.randint(1000))


def test_permutation_is_a_function_of_seed_and_epoch():
    first = draw_permutation(100, mix_seed(5, 2)).tolist()
    assert sorted(first) == list(range(100))
    assert draw_permutation(100, mix_seed(5, 2)).tolist() == first
    assert draw_permutation(100, mix_seed(5, 3)).tolist() != first
    assert draw_permutation(100, mix_seed(6, 2)).tolist() != first


def test_neighboring_seeds_and_epochs_give_different_orders():
    orders = {tuple(draw_permutation(20, mix_seed(seed, epoch))) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


def test_drawing_keeps_the_global_rng_state():
    before = torch.get_rng_state()
    PureOrder(range(10), True, 1).draw_order(0)
    list(make_order(Shuffling(100, "torch")).draw_order(0))
    assert torch.equal(torch.get_rng_state(), before)


def choose_order(sampler, is_seedable):
    config = DataLoaderConfiguration(use_seedable_sampler=is_seedable)
    return LoadingRules().choose_order(sampler, RandomSource(config, 1, LoaderGenerator(), None, True))


@pytest.mark.parametrize(
    ("sampler", "is_pure"),
    [
        (SequentialSampler(range(9)), True),
        (RandomSampler(range(9)), True),
        (RandomSampler(range(9), num_samples=9), True),
        (RandomSampler(range(9), num_samples=4), False),
        (RandomSampler(range(9), replacement=True), False),
        (RandomSampler(range(9), generator=torch.Generator()), False),
        (SubsetRandomSampler(range(9)), False),
        (WeightedRandomSampler([1.0] * 9, 4), False),
    ],
)
def test_order_is_pure_only_for_whole_permutations_without_a_generator(sampler, is_pure):
    assert isinstance(choose_order(sampler, True), PureOrder) == is_pure


def test_without_seedable_sampling_only_sequential_reading_is_pure():
    assert not isinstance(choose_order(RandomSampler(range(9)), False), PureOrder)
    assert isinstance(choose_order(SequentialSampler(range(9)), False), PureOrder)


def test_seeking_in_eight_million_rows_slices_one_permutation():
    order = PureOrder(range(8_000_000), True, 3)
    start = SampleSplit(4, 1).split_epoch(order.draw_order(0), num_skipped_steps=1_900_000)
    first = next(start.steps)
    assert isinstance(first, numpy.ndarray)
    assert first.tolist() == draw_permutation(8_000_000, mix_seed(3, 0))[7_600_000:7_600_004].tolist()


@pytest.mark.parametrize("source", ["torch", "python", "numpy"])
def test_sampler_without_a_generator_is_a_function_of_seed_and_epoch(source):
    def draw_order(seed, epoch, noise):
        iterator = make_order(Shuffling(200, source), seed).draw_order(epoch)
        out = []
        for index in iterator:
            out.append(index)
            if noise:  # numbers drawn by training
                torch.rand(1), random.random(), numpy.random.rand()
        return out

    assert draw_order(1, 0, noise=False) == draw_order(1, 0, noise=True)
    assert draw_order(1, 0, False) != draw_order(1, 1, False)
    assert draw_order(1, 0, False) != draw_order(2, 0, False)


@pytest.mark.parametrize("source", ["torch", "python", "numpy"])
def test_training_draws_as_if_the_sampler_did_not(source):
    def draw_in_training(order):
        torch.manual_seed(5), random.seed(5), numpy.random.seed(5)
        drawn = []
        for _ in order:
            drawn.append((torch.rand(()).item(), random.random(), numpy.random.rand()))
        return drawn

    assert draw_in_training(make_order(Shuffling(150, source)).draw_order(0)) == draw_in_training(range(150))


@pytest.mark.parametrize(
    "make",
    [
        lambda g: DataLoader(range(40), batch_size=4, shuffle=True, generator=g),
        lambda g: DataLoader(range(40), batch_size=4, sampler=RandomSampler(range(40), generator=g)),
        lambda g: DataLoader(range(40), batch_size=4, sampler=RandomSampler(range(40), True, 70, generator=g)),
        lambda g: DataLoader(
            range(40), batch_size=4, sampler=SubsetRandomSampler(range(0, 40, 3), generator=g), generator=g
        ),
        lambda g: DataLoader(range(40), batch_size=4, sampler=WeightedRandomSampler([1.0] * 40, 30, generator=g)),
    ],
)
def test_seeded_generator_gives_the_order_of_a_plain_loader(make):
    plain = make(torch.Generator().manual_seed(11))
    expected = [[index for batch in plain for index in batch.tolist()] for _ in range(3)]
    loader = prepare(make(torch.Generator().manual_seed(11)))
    assert [[index for batch in loader for index in batch.tolist()] for _ in range(3)] == expected


def make_drawn_order(sampler, broadcast=None):
    return DrawnOrder(sampler, LoaderGenerator(), broadcast)


def test_drawn_order_equals_the_plain_samplers_and_leaves_the_same_state():
    sampler = RandomSampler(range(20))
    torch.manual_seed(3)
    expected = [list(sampler) for _ in range(2)]
    state = torch.get_rng_state()
    torch.manual_seed(3)
    order = make_drawn_order(sampler)
    assert [order.draw_order(0).tolist(), order.draw_order(1).tolist()] == expected
    assert torch.equal(torch.get_rng_state(), state)


def test_saved_drawn_order_is_repeated_without_drawing():
    order = make_drawn_order(RandomSampler(range(50)))
    second = [order.draw_order(0).tolist(), order.draw_order(1).tolist()][1]
    resumed = make_drawn_order(RandomSampler(range(50)))
    resumed.load_state(order.state(is_running=True))
    before = torch.get_rng_state()
    resumed.draw_ahead()
    assert resumed.state(is_running=False) == order.state(is_running=True)
    assert resumed.draw_order(1).tolist() == second
    assert torch.equal(torch.get_rng_state(), before)
    assert resumed.draw_order(2).tolist() != second
    assert order.state(is_running=False) == {}


def test_order_drawn_ahead_for_workers_is_the_order_of_the_pass():
    torch.manual_seed(3)
    order = make_drawn_order(RandomSampler(range(20)))
    expected = RandomSampler(range(20))
    order.draw_ahead()
    torch.manual_seed(3)
    assert order.draw_order(0).tolist() == list(expected)


def test_drawn_order_is_that_of_rank_0():
    told = {}
    orders = [make_drawn_order(range(30), lambda number: told.setdefault("number", number)) for _ in range(2)]
    assert orders[0].draw_order(0).tolist() == orders[1].draw_order(0).tolist()


@pytest.mark.parametrize("source", ["torch", "python", "numpy"])
def test_sampler_that_draws_at_once_leaves_the_state_of_a_plain_one(source):
    class AtOnce(Shuffling):
        def __iter__(self):
            return iter(list(super().__iter__()))

    def draw_with_training(order):
        torch.manual_seed(5), random.seed(5), numpy.random.seed(5)
        return [(index, torch.rand(()).item(), random.random(), numpy.random.rand()) for index in order()]

    sampler = AtOnce(150, source)
    order = make_order(sampler, is_seedable=False)
    assert draw_with_training(lambda: order.draw_order(0)) == draw_with_training(lambda: sampler)


@pytest.mark.parametrize("source", ["torch", "python", "numpy"])
def test_sampler_that_draws_step_by_step_can_be_repeated(source):
    order = make_order(Shuffling(150, source), is_seedable=False)
    first = []
    for index in order.draw_order(0):
        first.append(index)
        torch.rand(1), random.random(), numpy.random.rand()  # training draws in between
    resumed = make_order(Shuffling(150, source), is_seedable=False)
    resumed.load_state(order.state(is_running=True))
    assert list(resumed.draw_order(0)) == first


@pytest.mark.parametrize("is_seedable", [True, False])
@pytest.mark.parametrize("has_generator", [True, False])
def test_epoch_is_repeated_from_its_state(is_seedable, has_generator):
    def make():
        generator = torch.Generator().manual_seed(1) if has_generator else None
        return make_order(WeightedRandomSampler([1.0] * 50, 50, generator=generator), is_seedable=is_seedable)

    order = make()
    list(order.draw_order(0))
    second = order.draw_order(1)
    begun = [next(second) for _ in range(7)]
    state = order.state(is_running=True)
    rest = list(second)
    third = list(order.draw_order(2))
    resumed = make()
    resumed.load_state(state)
    assert resumed.state(is_running=False) == state
    assert list(resumed.draw_order(1)) == begun + rest
    if has_generator:
        assert list(resumed.draw_order(2)) == third


def test_between_epochs_the_state_is_that_of_the_next_epoch():
    sampler = SubsetRandomSampler(range(30), generator=torch.Generator().manual_seed(1))
    order = make_order(sampler)
    list(order.draw_order(0))
    state = order.state(is_running=False)
    expected = list(order.draw_order(1))
    resumed = make_order(SubsetRandomSampler(range(30), generator=torch.Generator().manual_seed(99)))
    resumed.load_state(state)
    assert list(resumed.draw_order(1)) == expected


def test_all_ranks_use_the_state_of_rank_0():
    told = {}

    def order(rank):
        def broadcast(state):
            return told.setdefault("state", state)

        generator = torch.Generator().manual_seed(rank)
        return make_order(SubsetRandomSampler(range(30), generator=generator), broadcast=broadcast)

    assert list(order(0).draw_order(0)) == list(order(1).draw_order(0))


def test_ranks_with_equal_rng_states_draw_and_others_use_those_of_rank_0():
    torch.manual_seed(5)
    expected = list(Shuffling(9, "torch"))
    after = torch.rand(1)

    torch.manual_seed(5)
    texts = []
    alike = make_order(Shuffling(9, "torch"), is_seedable=False, broadcast=lambda text: texts.append(text) or text)
    assert list(alike.draw_order(0)) == expected

    torch.manual_seed(6)
    other = make_order(Shuffling(9, "torch"), is_seedable=False, broadcast=lambda text: texts[0])
    own = torch.get_rng_state()
    assert list(other.draw_order(0)) == expected
    assert torch.equal(torch.get_rng_state(), own)
    assert not torch.equal(torch.rand(1), after)


@pytest.mark.parametrize("reads_first", [False, True])
def test_loaded_generator_continues_until_the_script_seeds_torch(reads_first):
    source = torch.Generator().manual_seed(3)
    loaded = LoaderGenerator(is_private=True)
    loaded.load_state(source.get_state())
    torch.manual_seed(5)  # like a resume on another number of ranks; training draws nothing
    expected = [int(torch.empty((), dtype=torch.int64).random_(generator=source)) for _ in range(3)]
    drawn = []
    for _ in range(2):
        if reads_first:
            loaded.encode_state()  # reads the state from which workers are seeded
        drawn.append(loaded.draw_seed())
    assert drawn == expected[:2]
    torch.manual_seed(5)  # the script seeds torch between two passes
    if reads_first:
        loaded.encode_state()
    assert loaded.draw_seed() != expected[2]
