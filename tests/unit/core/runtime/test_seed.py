"""Test seeds and RNG states on one process."""

import random

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway import set_seed, synchronize_rng_states
from headway.core.runtime.seed import mix_seed
from headway.errors import ConfigError


def draw_numbers():
    return random.random(), float(numpy.random.rand()), float(torch.rand(1))


def test_seed_repeats_the_numbers_of_every_generator():
    set_seed(5)
    first = draw_numbers()
    set_seed(5)
    assert draw_numbers() == first
    set_seed(6)
    assert not set(draw_numbers()) & set(first)
    set_seed(2**40)


@pytest.mark.parametrize("seed", [-1, 1.5, True, "3", None])
def test_invalid_seed_is_refused(seed):
    with pytest.raises(ConfigError, match="0 or more"):
        set_seed(seed)


def test_deterministic_enables_deterministic_algorithms():
    try:
        set_seed(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_unknown_and_missing_generators_are_refused():
    with pytest.raises(ConfigError, match="'dice'; allowed: python, numpy, torch, device, generator"):
        synchronize_rng_states(["torch", "dice"])
    with pytest.raises(ConfigError, match="no generator was given"):
        synchronize_rng_states(["generator"])
    state = torch.get_rng_state()
    synchronize_rng_states(["torch", "generator"], torch.Generator())
    assert torch.equal(torch.get_rng_state(), state)


@given(st.lists(st.integers(0, 2**70), min_size=1, max_size=4))
def test_mixed_seeds_are_valid_and_differ(parts):
    seed = mix_seed(*parts)
    assert 0 <= seed < 2**63
    assert mix_seed(*parts) == seed
    assert mix_seed(parts[0] + 1, *parts[1:]) != seed
    torch.Generator().manual_seed(seed)
