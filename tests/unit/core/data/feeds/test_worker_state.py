"""The book about workers' generators, as it is kept without any workers (tests/unit/test_same_numbers.py has real ones)."""

import pickle
import random

from headway.core.data.feeds.worker import IndexWithCall, WorkerBatch, WorkerRNGStates, WorkerStateCollate
from headway.core.data.sampling.rng import read_text, write_text


def read(rng_states, *texts):
    for text in texts:
        rng_states.record_batch(WorkerBatch("batch", text))


def resumed(state, count=2, is_persistent=False):
    rng_states = WorkerRNGStates(count, is_persistent)
    rng_states.load_state(state)
    return rng_states


def test_a_pass_goes_on_with_the_worker_whose_turn_it_is():
    rng_states = WorkerRNGStates(2, False)
    assert rng_states.start_pass(False) == 0
    assert rng_states.list_initial_states() == []
    read(rng_states, "a0", "b0", "a1")
    state = rng_states.state(is_running=True)
    again = resumed(state)
    assert again.start_pass(True) == 0
    assert again.list_initial_states() == ["b0", "a1"]
    read(again, "b1")
    assert again.state(is_running=True)["workers"] == {"streams": ["a1", "b1"], "num_batches": 4}


def test_streams_that_have_not_moved_are_as_they_were():
    rng_states = WorkerRNGStates(2, False)
    rng_states.start_pass(False)
    read(rng_states, "a0", "b0", None, "b1", None)
    assert rng_states.state(True)["workers"]["streams"] == ["a0", "b1"]


def test_a_pass_in_which_not_every_worker_had_a_batch_is_read_from_its_start():
    rng_states = WorkerRNGStates(3, False)
    rng_states.start_pass(False)
    read(rng_states, "a0", "b0")
    again = resumed(rng_states.state(True), 3)
    assert again.start_pass(True) == 2
    assert again.list_initial_states() == []


def test_another_number_of_workers_begins_afresh():
    rng_states = WorkerRNGStates(2, False)
    rng_states.start_pass(False)
    read(rng_states, "a0", "b0")
    again = resumed(rng_states.state(True), 3)
    assert (again.start_pass(True), again.list_initial_states()) == (0, [])


def test_persistent_workers_draw_on_in_the_next_pass():
    rng_states = WorkerRNGStates(2, True)
    rng_states.start_pass(False)
    read(rng_states, "a0", "b0", "a1")
    again = resumed(rng_states.state(is_running=False), is_persistent=True)
    assert again.start_pass(False) == 0
    assert again.list_initial_states() == ["a1", "b0"]
    once = WorkerRNGStates(2, False)
    once.start_pass(False)
    read(once, "a0")
    assert once.state(is_running=False) == {}


def test_collating_tells_only_of_streams_that_moved():
    collate = WorkerStateCollate(lambda samples: sum(samples))
    assert collate([1, 2]) == WorkerBatch(3, read_text())
    assert collate([3]) == WorkerBatch(3, None)
    random.random()
    assert collate([4]).rng_states == read_text()


def test_indices_arrive_as_they_were_and_set_the_streams():
    text = read_text()
    sent = pickle.dumps(IndexWithCall([4, 5], write_text, text))
    random.random()
    assert pickle.loads(sent) == [4, 5]
    assert read_text() == text
