"""Test the record of workers' RNG states without workers. tests/unit/test_same_numbers.py has real workers."""

import pickle
import random

from headway.core.data.feeds.worker import IndexWithCall, WorkerBatch, WorkerRNGStates, WorkerStateCollate
from headway.core.data.sampling.rng import encode_global_states, write_global_states


def record_batches(rng_states, *texts):
    for text in texts:
        rng_states.record_batch(WorkerBatch("batch", text))


def load_states(state, count=2, is_persistent=False):
    rng_states = WorkerRNGStates(count, is_persistent)
    rng_states.load_state(state)
    return rng_states


def test_pass_resumes_with_the_next_worker():
    rng_states = WorkerRNGStates(2, False)
    assert rng_states.start_pass(False) == 0
    assert rng_states.list_initial_states() == []
    record_batches(rng_states, "a0", "b0", "a1")
    state = rng_states.state(is_running=True)
    again = load_states(state)
    assert again.start_pass(True) == 0
    assert again.list_initial_states() == ["b0", "a1"]
    record_batches(again, "b1")
    assert again.state(is_running=True)["workers"] == {"streams": ["a1", "b1"], "num_batches": 4}


def test_rng_states_that_have_not_changed_are_kept():
    rng_states = WorkerRNGStates(2, False)
    rng_states.start_pass(False)
    record_batches(rng_states, "a0", "b0", None, "b1", None)
    assert rng_states.state(True)["workers"]["streams"] == ["a0", "b1"]


def test_pass_in_which_a_worker_had_no_batch_is_read_from_its_start():
    rng_states = WorkerRNGStates(3, False)
    rng_states.start_pass(False)
    record_batches(rng_states, "a0", "b0")
    again = load_states(rng_states.state(True), 3)
    assert again.start_pass(True) == 2
    assert again.list_initial_states() == []


def test_another_number_of_workers_starts_without_states():
    rng_states = WorkerRNGStates(2, False)
    rng_states.start_pass(False)
    record_batches(rng_states, "a0", "b0")
    again = load_states(rng_states.state(True), 3)
    assert (again.start_pass(True), again.list_initial_states()) == (0, [])


def test_persistent_workers_keep_their_states_in_the_next_pass():
    rng_states = WorkerRNGStates(2, True)
    rng_states.start_pass(False)
    record_batches(rng_states, "a0", "b0", "a1")
    again = load_states(rng_states.state(is_running=False), is_persistent=True)
    assert again.start_pass(False) == 0
    assert again.list_initial_states() == ["a1", "b0"]
    once = WorkerRNGStates(2, False)
    once.start_pass(False)
    record_batches(once, "a0")
    assert once.state(is_running=False) == {}


def test_collate_returns_rng_states_only_after_draws():
    collate = WorkerStateCollate(lambda samples: sum(samples))
    assert collate([1, 2]) == WorkerBatch(3, encode_global_states())
    assert collate([3]) == WorkerBatch(3, None)
    random.random()
    assert collate([4]).rng_states == encode_global_states()


def test_indices_arrive_unchanged_and_set_the_rng_states():
    text = encode_global_states()
    sent = pickle.dumps(IndexWithCall([4, 5], write_global_states, text))
    random.random()
    assert pickle.loads(sent) == [4, 5]
    assert encode_global_states() == text
