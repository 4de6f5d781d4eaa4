"""Test the seeds of worker processes: the numbers that a sample draws depend only on its position."""

import pickle
import random

import numpy
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from headway.core.data.feeds.worker import IndexWithCall, SeededIndices, is_read_one_by_one, seed_generators
from headway.core.runtime.seed import mix_seed
from tests.unit.core.data.fakes import Numbers


@pytest.fixture(autouse=True)
def rng_states():
    """Restore the RNG states after the test."""
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    yield
    torch.set_rng_state(states[0]), random.setstate(states[1]), numpy.random.set_state(states[2])


def draw_numbers():
    return torch.rand(()).item(), random.random(), numpy.random.rand()


def draw_for_indices(indices):
    """Return the first numbers drawn for each index. Like an augmentation, each sample draws a different number of times."""
    out = {}
    for index in indices:
        out[index] = draw_numbers()
        for _ in range(index % 3):
            draw_numbers()
    return out


def test_random_numbers_of_a_sample_depend_only_on_its_position():
    whole = draw_for_indices(pickle.loads(pickle.dumps(SeededIndices([7, 3, 9, 4], 5, 100))))
    parts = {}
    for position, half in ((102, [9, 4]), (100, [7, 3])):
        parts |= draw_for_indices(pickle.loads(pickle.dumps(SeededIndices(half, 5, position))))
    assert whole == parts
    assert len(set(whole.values())) == 4


def test_another_epoch_draws_other_numbers():
    one = draw_for_indices(pickle.loads(pickle.dumps(SeededIndices([7], 5, 0))))
    other = draw_for_indices(pickle.loads(pickle.dumps(SeededIndices([7], 6, 0))))
    assert one != other


def test_sending_indices_keeps_the_parents_rng_states():
    indices = SeededIndices([1, 2], 5, 0)
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    pickle.dumps(indices)
    pickle.dumps(IndexWithCall(3, seed_generators, mix_seed(5, 0)))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())


def test_batch_read_without_iterating_is_seeded_on_arrival():
    sent = pickle.dumps(SeededIndices([1, 2], 5, 40))
    pickle.loads(sent)
    first = draw_numbers()
    draw_numbers()
    pickle.loads(sent)
    assert draw_numbers() == first


def test_single_index_arrives_unwrapped_and_seeds():
    sent = pickle.dumps(IndexWithCall("key", seed_generators, mix_seed(5, 40)))
    assert pickle.loads(sent) == "key"
    first = draw_numbers()
    draw_numbers()
    pickle.loads(sent)
    assert draw_numbers() == first


def test_indices_are_still_a_list():
    arrived = pickle.loads(pickle.dumps(SeededIndices([4, 5], 1, 0)))
    assert isinstance(arrived, list)
    assert (arrived == [4, 5], len(arrived), arrived[1]) == (True, 2, 5)


def test_datasets_read_one_by_one_are_seeded_for_each_sample():
    class Batched(Numbers):
        def __getitems__(self, indices):
            return [self[index] for index in indices]

    assert is_read_one_by_one(Numbers(3))
    assert is_read_one_by_one(Subset(Subset(Numbers(3), [0, 1]), [0]))
    assert not is_read_one_by_one(Batched(3))
    assert not is_read_one_by_one(Subset(Batched(3), [0]))
    assert not is_read_one_by_one(TensorDataset(torch.zeros(3)))
    assert not is_read_one_by_one([1, 2, 3])


def test_whole_batch_arrives_as_a_list_and_seeds_by_its_first_position():
    arrived = pickle.loads(pickle.dumps(IndexWithCall([4, 5], seed_generators, mix_seed(5, 40))))
    first = draw_numbers()
    assert type(arrived) is list
    pickle.loads(pickle.dumps(IndexWithCall(9, seed_generators, mix_seed(5, 40))))
    assert draw_numbers() == first
