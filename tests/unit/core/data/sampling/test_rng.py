"""Test the generators that samplers and datasets own, and the state of the global generators."""

import random

import numpy
import torch
from torch.utils.data import RandomSampler, Sampler

from headway.core.data.sampling.own_generators import OwnGenerators, find_generators
from headway.core.data.sampling.rng import (
    GlobalGenerators,
    decode_torch_state,
    encode_global_states,
    encode_torch_state,
    write_global_states,
)


class Holder:
    """Object with its own generator."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self):
        return torch.rand(4, generator=self.generator).tolist()


def test_state_at_the_start_of_an_epoch_is_kept_during_the_epoch():
    holder = Holder(1)
    own = OwnGenerators(holder, None)
    own.start_epoch()
    first = holder.draw()
    state = own.state(is_running=True)
    other = Holder(2)
    resumed = OwnGenerators(other, None)
    resumed.load_state(state)
    assert resumed.state(is_running=False) == state
    resumed.start_epoch()
    assert other.draw() == first


def test_between_epochs_the_state_is_the_current_one():
    holder, other = Holder(1), Holder(2)
    own, resumed = OwnGenerators(holder, None), OwnGenerators(other, None)
    own.start_epoch(), holder.draw()
    resumed.load_state(own.state(is_running=False))
    resumed.start_epoch()
    assert other.draw() == holder.draw()


def test_state_saved_before_it_was_used_stays_the_same():
    own, resumed, again = (OwnGenerators(Holder(seed), None) for seed in range(3))
    own.start_epoch()
    resumed.load_state(own.state(is_running=True))
    again.load_state(resumed.state(is_running=False))
    assert again.state(is_running=False) == own.state(is_running=True)


def test_ranks_start_with_the_states_of_rank_0():
    told = {}
    holders = [Holder(1), Holder(2)]
    for holder in holders:
        OwnGenerators(holder, lambda texts: told.setdefault("texts", texts)).start_epoch()
    assert holders[0].draw() == holders[1].draw()


def test_object_without_generators_needs_no_agreement():
    def fail_if_called(texts):
        raise AssertionError("agree() was called")

    own = OwnGenerators(object(), fail_if_called)
    own.start_epoch()
    assert own.state(is_running=True) == own.state(is_running=False) == {}


def test_generators_are_found_in_any_attribute():
    class Private(Sampler):
        def __init__(self, inner):
            self._stream = torch.Generator()
            self.sampler = inner

        def __iter__(self):
            return iter(())

    inner = RandomSampler(range(3), generator=torch.Generator())
    sampler = Private(inner)
    assert [id(g) for g in find_generators(sampler)] == [id(sampler._stream), id(inner.generator)]
    assert find_generators([[0, 1], [2]]) == []


def test_states_are_restored_from_text():
    state = torch.Generator().manual_seed(9).get_state()
    assert torch.equal(decode_torch_state(encode_torch_state(state)), state)


def test_global_generators_are_restored_after_the_block():
    rng_states = GlobalGenerators.from_seed(1)
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    with rng_states:
        first = torch.rand(3), random.random(), numpy.random.rand()
    after = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    with rng_states:
        assert random.random() != first[1]


def test_states_of_global_generators_are_restored_from_text():
    random.seed(1), numpy.random.seed(2), torch.manual_seed(3)
    random.gauss(0, 1), numpy.random.randn()  # each stores the second number of a pair
    text = encode_global_states()

    def draw_numbers():
        return random.gauss(0, 1), random.random(), numpy.random.randn(), numpy.random.rand(), torch.rand(3).tolist()

    first = draw_numbers()
    assert draw_numbers() != first
    write_global_states(text)
    assert encode_global_states() == text
    assert draw_numbers() == first
