"""The largest batch, on events that are written by hand."""

import pytest

from headway.forecasting.device.allocator import MemoryEvent, replay_events
from headway.forecasting.forecaster import BudgetSearch, SizedEvents, is_same_sequence

MIB = 1 << 20


class Counted:
    """Events, and the sizes for which they were asked."""

    def __init__(self, events):
        self.events, self.sizes = events, []

    def __call__(self, size):
        self.sizes.append(size)
        return self.events(size)


def takes(events):
    return replay_events(events).reserved


def step(batch):
    return [
        MemoryEvent(1, 100 * MIB, "weights"),
        MemoryEvent(2, 30 * MIB * batch, "mm"),
        MemoryEvent(3, (10 * batch + 5) * MIB, "add"),
        MemoryEvent(3, -(10 * batch + 5) * MIB, "add"),
        MemoryEvent(2, -30 * MIB * batch, "mm"),
    ]


def test_two_traces_give_every_size():
    for batch in (1, 8, 200):
        assert SizedEvents([step(8), step(9)], 8).build_events(batch) == step(batch)


def test_other_sequences_are_not_alike():
    assert not is_same_sequence(step(8), step(9)[:-1])
    assert not is_same_sequence(step(1), [event._replace(what="other") for event in step(1)])


def attention(length):
    scores = 3 * length * length * MIB
    return [MemoryEvent(1, 100 * MIB, "weights"), MemoryEvent(2, scores, "bmm"), MemoryEvent(3, 7 * length * MIB, "add"),
            MemoryEvent(3, -7 * length * MIB, "add"), MemoryEvent(2, -scores, "bmm")]  # fmt: skip


def test_three_traces_give_what_grows_with_the_square():
    for length in (1, 8, 300):
        assert SizedEvents([attention(8), attention(9), attention(10)], 8).build_events(length) == attention(length)


@pytest.mark.parametrize("capacity", [100, 300, 4000, 90_000])
def test_the_longest_sequence_where_memory_grows_with_the_square(capacity):
    traced = Counted(attention)
    found = BudgetSearch(traced, takes, capacity * MIB, degree=2).find_largest()
    assert found == 0 or takes(attention(found)) <= capacity * MIB
    assert takes(attention(found + 1)) > capacity * MIB
    assert len(traced.sizes) <= 5


@pytest.mark.parametrize("limit", [1, 8, 9, 10, 13])
def test_no_longer_than_the_limit(limit):
    assert BudgetSearch(attention, takes, 1 << 60, limit, degree=2).find_largest() == limit


def test_the_curve_is_what_each_size_takes():
    search = BudgetSearch(step, takes, 1000 * MIB)
    search.find_largest()
    assert search.compute_curve([1, 5, 40]) == [(size, takes(step(size))) for size in (1, 5, 40)]


@pytest.mark.parametrize("capacity", [0, 100, 144, 146, 150, 500, 1000, 24_000])
def test_the_largest_that_fits_and_no_more(capacity):
    traced = Counted(step)
    found = BudgetSearch(traced, takes, capacity * MIB).find_largest()
    assert found == 0 or takes(step(found)) <= capacity * MIB
    assert takes(step(found + 1)) > capacity * MIB
    assert len(traced.sizes) <= 4


def test_events_that_change_with_the_batch_are_traced():
    def odd(batch):
        return step(batch) + [MemoryEvent(10 + each, 1) for each in range(batch)]

    traced = Counted(odd)
    found = BudgetSearch(traced, takes, 1000 * MIB).find_largest()
    assert {found, found + 1} <= set(traced.sizes)
    assert len(traced.sizes) == len(set(traced.sizes))
    assert takes(odd(found)) <= 1000 * MIB
    assert takes(odd(found + 1)) > 1000 * MIB


def test_a_jump_at_large_batches_is_found_by_the_trace_at_the_answer():
    def jumps(batch):
        return step(batch) if batch < 15 else [MemoryEvent(9, 500 * MIB, "sort"), *step(batch)]

    assert BudgetSearch(jumps, takes, 1000 * MIB).find_largest() == 14
    assert BudgetSearch(jumps, takes, 1400 * MIB).find_largest() == 19


def test_a_limit_is_kept():
    assert BudgetSearch(step, takes, 100_000 * MIB, limit=20).find_largest() == 20


def test_no_answer_above_a_batch_that_fragments():
    def fragmented(events):
        batch = events[1].num_bytes // (30 * MIB)
        return takes(events) + (300 * MIB if batch == 17 else 0)

    assert BudgetSearch(step, takes, 1000 * MIB).find_largest() == 22
    assert BudgetSearch(step, fragmented, 1000 * MIB).find_largest() == 16
