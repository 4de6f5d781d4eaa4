"""Test the search for the largest batch on events written by hand."""

import pytest

from headway.forecasting.budget_search import PROBE, BudgetSearch, SizedEvents, is_same_sequence
from headway.forecasting.device.allocator import replay_events
from headway.forecasting.device.memory_events import MemoryEvent, StepMemory

MIB = 1 << 20


class CountingEvents:
    """Function that returns events, and records the sizes for which it was called."""

    def __init__(self, events):
        self.events, self.sizes = events, []

    def __call__(self, size):
        self.sizes.append(size)
        return self.events(size)


def measure_memory(memory):
    return replay_events(memory.events).reserved + memory.unsure_bytes


def make_step(batch):
    events = [
        MemoryEvent(1, 100 * MIB, "weights"),
        MemoryEvent(2, 30 * MIB * batch, "mm"),
        MemoryEvent(3, (10 * batch + 5) * MIB, "add"),
        MemoryEvent(3, -(10 * batch + 5) * MIB, "add"),
        MemoryEvent(2, -30 * MIB * batch, "mm"),
    ]
    return StepMemory(events)


def test_two_traces_give_every_size():
    for batch in (1, 8, 200):
        assert SizedEvents([make_step(8), make_step(9)], 8).build_memory(batch) == make_step(batch)


def test_different_sequences_are_detected():
    step = make_step(8)
    assert is_same_sequence(step, make_step(9))
    assert not is_same_sequence(step, step._replace(events=step.events[:-1]))
    renamed_events = [event._replace(operation="other") for event in step.events]
    assert not is_same_sequence(step, step._replace(events=renamed_events))
    assert not is_same_sequence(step, step._replace(unsure_bytes=MIB))


def make_attention(length):
    scores = 3 * length * length * MIB
    return StepMemory([
        MemoryEvent(1, 100 * MIB, "weights"), MemoryEvent(2, scores, "bmm"), MemoryEvent(3, 7 * length * MIB, "add"),
        MemoryEvent(3, -7 * length * MIB, "add"), MemoryEvent(2, -scores, "bmm"),
    ])  # fmt: skip


def test_three_traces_give_quadratic_growth():
    for length in (1, 8, 300):
        assert SizedEvents([make_attention(8), make_attention(9), make_attention(10)], 8).build_memory(
            length
        ) == make_attention(length)


@pytest.mark.parametrize("capacity", [100, 300, 4000, 90_000])
def test_longest_sequence_with_quadratic_growth_is_found_in_five_traces(capacity):
    traced = CountingEvents(make_attention)
    found = BudgetSearch(traced, measure_memory, capacity * MIB, degree=2).find_largest()
    assert found == 0 or measure_memory(make_attention(found)) <= capacity * MIB
    assert measure_memory(make_attention(found + 1)) > capacity * MIB
    assert len(traced.sizes) <= 5


@pytest.mark.parametrize("limit", [1, 8, 9, 10, 13])
def test_result_does_not_exceed_the_limit(limit):
    assert BudgetSearch(make_attention, measure_memory, 1 << 60, limit, degree=2).find_largest() == limit


def test_curve_traces_sizes_that_may_use_other_kernels():
    def make_events(size):
        return make_step(size if size >= PROBE else 2 * size)

    search = BudgetSearch(make_events, measure_memory, 1000 * MIB)
    assert search.compute_curve([1, 7, 8, 20]) == [(size, measure_memory(make_events(size))) for size in (1, 7, 8, 20)]


def test_curve_gives_the_memory_of_each_size():
    search = BudgetSearch(make_step, measure_memory, 1000 * MIB)
    search.find_largest()
    assert search.compute_curve([1, 5, 40]) == [(size, measure_memory(make_step(size))) for size in (1, 5, 40)]


@pytest.mark.parametrize("capacity", [0, 100, 144, 146, 150, 500, 1000, 24_000])
def test_largest_batch_that_fits_is_found(capacity):
    traced = CountingEvents(make_step)
    found = BudgetSearch(traced, measure_memory, capacity * MIB).find_largest()
    assert found == 0 or measure_memory(make_step(found)) <= capacity * MIB
    assert measure_memory(make_step(found + 1)) > capacity * MIB
    assert len(traced.sizes) <= 4


def test_events_that_change_with_the_batch_are_traced():
    def make_odd_step(batch):
        step = make_step(batch)
        return step._replace(events=step.events + [MemoryEvent(10 + each, 1) for each in range(batch)])

    traced = CountingEvents(make_odd_step)
    found = BudgetSearch(traced, measure_memory, 1000 * MIB).find_largest()
    assert {found, found + 1} <= set(traced.sizes)
    assert len(traced.sizes) == len(set(traced.sizes))
    assert measure_memory(make_odd_step(found)) <= 1000 * MIB
    assert measure_memory(make_odd_step(found + 1)) > 1000 * MIB


def test_jump_at_large_batches_is_found_by_the_trace_at_the_answer():
    def make_jump(batch):
        step = make_step(batch)
        return step if batch < 15 else step._replace(events=[MemoryEvent(9, 500 * MIB, "sort"), *step.events])

    assert BudgetSearch(make_jump, measure_memory, 1000 * MIB).find_largest() == 14
    assert BudgetSearch(make_jump, measure_memory, 1400 * MIB).find_largest() == 19


def test_memory_that_a_run_might_need_counts_and_grows_with_the_batch():
    def make_unsure_step(batch):
        return make_step(batch)._replace(unsure_bytes=(20 * batch + 3) * MIB)

    search = BudgetSearch(make_unsure_step, measure_memory, 1000 * MIB)
    assert search.find_largest() == 14
    assert search.compute_curve([20]) == [(20, measure_memory(make_unsure_step(20)))]


def test_limit_is_kept():
    assert BudgetSearch(make_step, measure_memory, 100_000 * MIB, limit=20).find_largest() == 20


def test_answer_is_not_above_a_batch_that_fragments():
    def measure_fragmented(memory):
        batch = memory.events[1].num_bytes // (30 * MIB)
        return measure_memory(memory) + (300 * MIB if batch == 17 else 0)

    assert BudgetSearch(make_step, measure_memory, 1000 * MIB).find_largest() == 22
    assert BudgetSearch(make_step, measure_fragmented, 1000 * MIB).find_largest() == 16
