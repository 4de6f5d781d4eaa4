"""Test the position of a loader: epochs, interrupted passes, loaded states, and epochs set by the script."""

import pytest

from headway.core.data.sampling.position import Position
from headway.errors import StateError


def test_epochs_are_counted():
    position = Position()
    for epoch in range(3):
        position.start_pass()
        assert (position.epoch, position.num_consumed) == (epoch, 0)
        position.num_consumed = 10
        position.end_epoch()
    assert position.state_dict() == {"epoch": 3, "consumed": 0}


def test_interrupted_pass_keeps_its_position_until_the_next_begins():
    position = Position()
    position.start_pass()
    position.num_consumed = 4
    assert position.state_dict() == {"epoch": 0, "consumed": 4}
    position.start_pass()
    assert (position.epoch, position.num_consumed) == (1, 0)


def test_loaded_state_is_resumed_once():
    position = Position()
    position.load_state_dict({"epoch": 2, "consumed": 5})
    position.start_pass()
    assert (position.epoch, position.num_consumed) == (2, 5)
    position.end_epoch()
    position.start_pass()
    assert (position.epoch, position.num_consumed) == (3, 0)


def test_pinning_the_loaded_epoch_keeps_the_position():
    position = Position()
    position.load_state_dict({"epoch": 2, "consumed": 5})
    position.set_next_epoch(2)
    position.start_pass()
    assert (position.epoch, position.num_consumed) == (2, 5)


def test_pinning_another_epoch_starts_it():
    position = Position()
    position.load_state_dict({"epoch": 2, "consumed": 5})
    position.set_next_epoch(7)
    position.start_pass()
    assert (position.epoch, position.num_consumed) == (7, 0)


def test_pinning_inside_a_pass_applies_to_the_next_one():
    position = Position()
    position.start_pass()
    position.num_consumed = 3
    position.set_next_epoch(9)
    assert position.state_dict() == {"epoch": 0, "consumed": 3}
    position.end_epoch()
    assert position.epoch == 9
    position.start_pass()
    position.end_epoch()
    assert position.epoch == 10


def test_pinning_the_same_epoch_after_a_break_repeats_it():
    position = Position()
    position.start_pass()
    position.set_next_epoch(0)
    position.start_pass()
    assert position.epoch == 0


def test_invalid_state_is_refused():
    with pytest.raises(StateError, match=r"needs epoch and consumed, got \['step'\]"):
        Position().load_state_dict({"step": 3})
