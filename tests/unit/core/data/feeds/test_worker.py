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
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    yield
    torch.set_rng_state(states[0]), random.setstate(states[1]), numpy.random.set_state(states[2])


def draws():
    return torch.rand(()).item(), random.random(), numpy.random.rand()


def augmented(indices):
    """What a dataset that draws a number of times that depends on the sample would make."""
    out = {}
    for index in indices:
        out[index] = draws()
        for _ in range(index % 3):
            draws()
    return out


def test_a_samples_numbers_depend_on_its_position_alone():
    whole = augmented(pickle.loads(pickle.dumps(SeededIndices([7, 3, 9, 4], 5, 100))))
    parts = {}
    for position, half in ((102, [9, 4]), (100, [7, 3])):
        parts |= augmented(pickle.loads(pickle.dumps(SeededIndices(half, 5, position))))
    assert whole == parts
    assert len(set(whole.values())) == 4


def test_another_epoch_draws_other_numbers():
    one = augmented(pickle.loads(pickle.dumps(SeededIndices([7], 5, 0))))
    other = augmented(pickle.loads(pickle.dumps(SeededIndices([7], 6, 0))))
    assert one != other


def test_sending_leaves_the_parents_streams_alone():
    indices = SeededIndices([1, 2], 5, 0)
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    pickle.dumps(indices)
    pickle.dumps(IndexWithCall(3, seed_generators, mix_seed(5, 0)))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())


def test_a_batch_that_is_read_without_iterating_is_seeded_on_arrival():
    sent = pickle.dumps(SeededIndices([1, 2], 5, 40))
    pickle.loads(sent)
    first = draws()
    draws()
    pickle.loads(sent)
    assert draws() == first


def test_a_single_index_arrives_bare_and_seeds():
    sent = pickle.dumps(IndexWithCall("key", seed_generators, mix_seed(5, 40)))
    assert pickle.loads(sent) == "key"
    first = draws()
    draws()
    pickle.loads(sent)
    assert draws() == first


def test_indices_are_still_a_list():
    arrived = pickle.loads(pickle.dumps(SeededIndices([4, 5], 1, 0)))
    assert isinstance(arrived, list)
    assert (arrived == [4, 5], len(arrived), arrived[1]) == (True, 2, 5)


def test_which_datasets_are_seeded_for_each_sample():
    class Batched(Numbers):
        def __getitems__(self, indices):
            return [self[index] for index in indices]

    assert is_read_one_by_one(Numbers(3))
    assert is_read_one_by_one(Subset(Subset(Numbers(3), [0, 1]), [0]))
    assert not is_read_one_by_one(Batched(3))
    assert not is_read_one_by_one(Subset(Batched(3), [0]))
    assert not is_read_one_by_one(TensorDataset(torch.zeros(3)))
    assert not is_read_one_by_one([1, 2, 3])


def test_a_whole_batch_arrives_as_a_plain_list_and_seeds_by_its_first_position():
    arrived = pickle.loads(pickle.dumps(IndexWithCall([4, 5], seed_generators, mix_seed(5, 40))))
    first = draws()
    assert type(arrived) is list
    pickle.loads(pickle.dumps(IndexWithCall(9, seed_generators, mix_seed(5, 40))))
    assert draws() == first
