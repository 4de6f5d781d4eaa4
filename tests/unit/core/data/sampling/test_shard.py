"""Test how samples, ready-made batches and windows are split between ranks: order, fillers and positions."""

import itertools
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.data.sampling.shard import BatchSplit, SampleSplit, UpdateSplit, fill_by_cycling, mark_last


def split_epoch(split, order, num_consumed=0, num_skipped_steps=0):
    """Return, for each rank, the (rows, counts) of every round."""
    ranks = []
    for rank in range(split.num_ranks):
        start = split.split_epoch(
            iter(order) if isinstance(split, BatchSplit) else order, num_consumed, num_skipped_steps
        )
        ranks.append([split.get_rank_samples(chunk, rank, start.first_items) for chunk in start.steps])
    return ranks


def join_real_rows(ranks):
    """Return the real rows of all rounds, ordered by round and rank."""
    out = []
    for parts in zip(*ranks, strict=True):
        assert len({counts for _, counts in parts}) == 1
        for rank, (rows, counts) in enumerate(parts):
            out += rows[: counts[rank]]
    return out


def make_samples(n, kind):
    return range(n) if kind == "sequence" else iter(range(n))


sizes = st.integers(1, 7)


worlds = st.integers(1, 5)


lengths = st.integers(0, 50)


kinds = st.sampled_from(["sequence", "iterator"])


@settings(max_examples=400, deadline=None)
@given(n=lengths, size=sizes, count=worlds, drop_last=st.booleans(), even_batches=st.booleans(), kind=kinds)
def test_each_real_sample_comes_once_and_in_order(n, size, count, drop_last, even_batches, kind):
    split = SampleSplit(size, count, drop_last, even_batches)
    ranks = []
    for rank in range(count):
        start = split.split_epoch(make_samples(n, kind))
        ranks.append([split.get_rank_samples(chunk, rank, start.first_items) for chunk in start.steps])
    expected = n - n % (size * count) if drop_last else n
    assert join_real_rows(ranks) == list(range(expected))
    assert {len(steps) for steps in ranks} == {split.count_steps(n)}
    for parts in zip(*ranks):
        for rank, (rows, counts) in enumerate(parts):
            assert rows, "no rank may be left without a batch"
            assert 0 <= counts[rank] <= len(rows) <= size
            assert all(0 <= row < n for row in rows)
            if even_batches or drop_last:
                assert len(rows) == size


@settings(max_examples=200, deadline=None)
@given(n=lengths, size=sizes, count=worlds, num_consumed=st.integers(0, 50), kind=kinds)
def test_epoch_resumes_at_any_sample(n, size, count, num_consumed, kind):
    split = SampleSplit(size, count)
    num_consumed = min(num_consumed, n)
    ranks = []
    for rank in range(count):
        start = split.split_epoch(make_samples(n, kind), num_consumed)
        assert start.num_consumed == num_consumed
        assert start.first_items == list(range(min(n, size * count)))
        ranks.append([split.get_rank_samples(chunk, rank, start.first_items) for chunk in start.steps])
    assert join_real_rows(ranks) == list(range(num_consumed, n))


@settings(max_examples=200, deadline=None)
@given(n=lengths, size=sizes, count=worlds, num_skipped_steps=st.integers(0, 12), drop_last=st.booleans(), kind=kinds)
def test_skipping_rounds_keeps_the_rest_unchanged(n, size, count, num_skipped_steps, drop_last, kind):
    split = SampleSplit(size, count, drop_last)
    start = split.split_epoch(make_samples(n, kind))
    whole = [split.get_rank_samples(chunk, 0, start.first_items) for chunk in start.steps]
    start = split.split_epoch(make_samples(n, kind), num_skipped_steps=num_skipped_steps)
    assert [split.get_rank_samples(chunk, 0, start.first_items) for chunk in start.steps] == whole[num_skipped_steps:]


@pytest.mark.parametrize(
    ("even_batches", "expected"),
    [
        (True, [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]),
        (False, [[[0, 1], [4, 5]], [[2, 3], [6]]]),
    ],
)
def test_last_round_is_completed_from_the_start(even_batches, expected):
    ranks = split_epoch(SampleSplit(2, 2, even_batches=even_batches), range(7))
    assert [[rows for rows, _ in steps] for steps in ranks] == expected
    assert [counts for _, counts in ranks[0]] == [(2, 2), (2, 1)]


def test_rank_without_samples_copies_the_first_batch_of_the_round():
    ranks = split_epoch(SampleSplit(4, 3, even_batches=False), range(14))
    assert [steps[-1] for steps in ranks] == [([12, 13], (2, 0, 0))] * 3


def test_fewer_samples_than_one_round_are_repeated():
    ranks = split_epoch(SampleSplit(4, 2), range(3))
    assert ranks == [[([0, 1, 2, 0], (3, 0))], [([1, 2, 0, 1], (3, 0))]]


batches = st.lists(st.integers(1, 5), max_size=12).map(
    lambda lengths: [list(range(end - size, end)) for size, end in zip(lengths, itertools.accumulate(lengths))]
)


@settings(max_examples=400, deadline=None)
@given(order=batches, count=worlds, is_split=st.booleans(), drop_last=st.booleans(), even_batches=st.booleans())
def test_ready_made_batches_of_any_size_come_once_and_in_order(order, count, is_split, drop_last, even_batches):
    split = BatchSplit(count, is_split, drop_last, even_batches)
    ranks = split_epoch(split, order)
    kept = order[: len(order) - len(order) % count] if drop_last and not is_split else order
    assert join_real_rows(ranks) == list(itertools.chain(*kept))
    assert {len(steps) for steps in ranks} == {split.count_steps(len(order))}
    assert all(rows for steps in ranks for rows, _ in steps)
    if is_split and even_batches:
        for parts in zip(*ranks):
            assert len({len(rows) for rows, _ in parts}) == 1


@settings(max_examples=200, deadline=None)
@given(order=batches, count=worlds, is_split=st.booleans(), num_consumed=st.integers(0, 60))
def test_ready_made_batches_resume_at_any_sample(order, count, is_split, num_consumed):
    samples = list(itertools.chain(*order))
    assert join_real_rows(split_epoch(BatchSplit(count, is_split), order, num_consumed)) == samples[num_consumed:]


@settings(max_examples=200, deadline=None)
@given(order=batches, count=worlds, is_split=st.booleans(), num_skipped_steps=st.integers(0, 8))
def test_skipping_ready_made_rounds_counts_their_samples(order, count, is_split, num_skipped_steps):
    split = BatchSplit(count, is_split)
    skipped = order[: num_skipped_steps * (1 if is_split else count)]
    start = split.split_epoch(iter(order), num_skipped_steps=num_skipped_steps)
    assert start.num_consumed == sum(map(len, skipped))
    assert [rows for rows, _ in split_epoch(split, order, num_skipped_steps=num_skipped_steps)[0]] == [
        rows for rows, _ in split_epoch(split, order)[0]
    ][num_skipped_steps:]


def test_ranks_without_a_ready_made_batch_take_the_first_ones():
    order = [[0, 1], [2, 3, 4], [5, 6], [7]]
    ranks = split_epoch(BatchSplit(3), order)
    assert [steps[-1] for steps in ranks] == [([7], (1, 0, 0)), ([0, 1], (1, 0, 0)), ([2, 3, 4], (1, 0, 0))]
    uneven = split_epoch(BatchSplit(3, even_batches=False), order)
    assert [steps[-1] for steps in uneven] == [([7], (1, 0, 0))] * 3


def test_short_batch_of_a_known_size_is_completed():
    ranks = split_epoch(BatchSplit(2, batch_size=3), [[0, 1, 2], [3, 4, 5], [6]])
    assert [steps[-1] for steps in ranks] == [([6, 0, 1], (1, 0)), ([0, 1, 2], (1, 0))]


def test_lists_of_a_sampler_are_never_changed():
    order = [[0, 1], [2]]
    split_epoch(BatchSplit(2, batch_size=2), order)
    assert order == [[0, 1], [2]]


def test_sampler_may_reuse_its_list():
    def yield_one_list():
        batch = []
        for row in range(6):
            batch.append(row)
            if len(batch) == 2:
                yield batch
                batch.clear()

    start = BatchSplit(2).split_epoch(yield_one_list())
    assert list(start.steps) == [[[0, 1], [2, 3]], [[4, 5]]]


def test_find_offset_returns_the_first_sample_of_a_rank():
    assert [SampleSplit(4, 3).find_first_index(range(12), rank) for rank in range(3)] == [0, 4, 8]
    assert [BatchSplit(3).find_first_index([[1, 2], [3], [4, 5, 6]], rank) for rank in range(3)] == [0, 2, 3]


@given(st.lists(st.integers(), max_size=5))
def test_only_the_last_item_is_marked_last(items):
    assert list(mark_last(items)) == [(item, i == len(items) - 1) for i, item in enumerate(items)]


def test_fill_by_cycling_repeats_its_source():
    assert fill_by_cycling([9], [1, 2], 6) == [9, 1, 2, 1, 2, 1]
    assert fill_by_cycling([9, 8], [1], 1) == [9, 8]


@settings(max_examples=300, deadline=None)
@given(n=lengths, size=sizes, count=worlds, drop_last=st.booleans(), kind=kinds)
def test_spread_end_gives_equal_rows_and_repeats_fewer_rows_than_ranks(n, size, count, drop_last, kind):
    split = SampleSplit(size, count, drop_last, spreads_last_step=True)
    ranks = []
    for rank in range(count):
        start = split.split_epoch(make_samples(n, kind))
        ranks.append([split.get_rank_samples(chunk, rank, start.first_items) for chunk in start.steps])
    expected = n - n % (size * count) if drop_last else n
    assert join_real_rows(ranks) == list(range(expected))
    for parts in zip(*ranks):
        assert len({len(rows) for rows, _ in parts}) == 1
        counts = parts[0][1]
        assert len(parts[0][0]) * count - sum(counts) < count


def test_spread_end_begins_where_the_previous_rank_ends():
    split = SampleSplit(4, 2, spreads_last_step=True)
    assert [split.find_first_index(range(5), rank) for rank in range(2)] == [0, 3]
    assert split.get_rank_samples(list(range(8, 13)), 1, [0, 1]) == ([11, 12, 0], (3, 2))


@st.composite
def make_window_splits(draw):
    window = draw(st.integers(1, 60))
    return UpdateSplit(window, draw(st.integers(1, window)), draw(st.integers(1, 7)), draw(st.sampled_from([1, 1, 3])))


@given(make_window_splits(), st.integers(0, 300), st.booleans())
def test_samples_come_once_in_order_in_the_expected_number_of_rounds(split, length, is_iterator):
    order = list(range(length))
    begun = split.split_epoch(iter(order) if is_iterator else order)
    steps = [list(each) for each in begun.steps]
    kept = []
    for begin in range(0, length, split.samples_per_update):
        part = order[begin : begin + split.samples_per_update]
        kept += part if len(part) == split.samples_per_update else part[: len(part) - len(part) % split.drop_multiple]
    assert list(chain(*steps)) == kept
    assert len(steps) == split.count_steps(length)
    assert all(steps)


@given(make_window_splits(), st.integers(1, 60))
def test_shares_are_even_with_real_rows_first(split, length):
    samples = list(range(length))
    shares = [split.get_rank_samples(samples, rank, []) for rank in range(split.num_ranks)]
    counts = shares[0][1]
    assert all(told == counts for _, told in shares)
    assert sum(counts) == length
    assert max(counts) - min(counts) <= 1
    assert list(chain(*(own[:count] for (own, _), count in zip(shares, counts)))) == samples
    assert [split.find_first_index(samples, rank) for rank in range(split.num_ranks)] == [
        sum(counts[:r]) for r in range(split.num_ranks)
    ]
    assert all(len(own) == max(count, 1) for (own, _), count in zip(shares, counts))


@given(make_window_splits(), st.integers(0, 5), st.integers(0, 200))
def test_epoch_starts_at_a_window_or_after_skipped_rounds(split, number, length):
    order = list(range(length))
    steps = [list(each) for each in split.split_epoch(order).steps]
    at = split.split_epoch(order, num_consumed=number * split.samples_per_update)
    flat = [s for s in chain(*steps) if s >= number * split.samples_per_update]
    assert list(chain(*at.steps)) == flat
    assert at.num_consumed == number * split.samples_per_update
    skipped = split.split_epoch(order, num_skipped_steps=number)
    assert [list(each) for each in skipped.steps] == steps[number:]
    assert skipped.num_consumed == sum(map(len, steps[:number]))


@pytest.mark.parametrize(("window", "steps", "count", "expected"), [
    (16, 1, 3, [[5, 5, 6]]),
    (16, 3, 3, [[1, 2, 2], [1, 2, 2], [2, 2, 2]]),
    (2, 1, 3, [[0, 1, 1]]),
])  # fmt: skip
def test_counts_of_some_windows(window, steps, count, expected):
    split = UpdateSplit(window, steps, count)
    found = [list(split.get_rank_samples(each, 0, [])[1]) for each in split.split_epoch(range(window)).steps]
    assert found == expected
    assert split.samples_per_step == (window if steps == 1 else None)
