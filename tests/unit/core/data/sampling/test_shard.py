"""Test how samples, ready-made batches and windows are split between ranks: order, fillers and positions."""

import itertools
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.data.sampling.shard import BatchSplit, SampleSplit, WindowSplit, fill_by_cycling, mark_last


def split_epoch(split, order, consumed=0, num_skipped=0):
    """Return, for each rank, the (rows, counts) of every round."""
    ranks = []
    for rank in range(split.count):
        start = split.split_epoch(iter(order) if isinstance(split, BatchSplit) else order, consumed, num_skipped)
        ranks.append([split.get_share(chunk, rank, start.opening) for chunk in start.rounds])
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
@given(n=lengths, size=sizes, count=worlds, drop_last=st.booleans(), is_even=st.booleans(), kind=kinds)
def test_each_real_sample_comes_once_and_in_order(n, size, count, drop_last, is_even, kind):
    split = SampleSplit(size, count, drop_last, is_even)
    ranks = []
    for rank in range(count):
        start = split.split_epoch(make_samples(n, kind))
        ranks.append([split.get_share(chunk, rank, start.opening) for chunk in start.rounds])
    expected = n - n % (size * count) if drop_last else n
    assert join_real_rows(ranks) == list(range(expected))
    assert {len(rounds) for rounds in ranks} == {split.count_rounds(n)}
    for parts in zip(*ranks):
        for rank, (rows, counts) in enumerate(parts):
            assert rows, "no rank may be left without a batch"
            assert 0 <= counts[rank] <= len(rows) <= size
            assert all(0 <= row < n for row in rows)
            if is_even or drop_last:
                assert len(rows) == size


@settings(max_examples=200, deadline=None)
@given(n=lengths, size=sizes, count=worlds, consumed=st.integers(0, 50), kind=kinds)
def test_epoch_resumes_at_any_sample(n, size, count, consumed, kind):
    split = SampleSplit(size, count)
    consumed = min(consumed, n)
    ranks = []
    for rank in range(count):
        start = split.split_epoch(make_samples(n, kind), consumed)
        assert start.consumed == consumed
        assert start.opening == list(range(min(n, size * count)))
        ranks.append([split.get_share(chunk, rank, start.opening) for chunk in start.rounds])
    assert join_real_rows(ranks) == list(range(consumed, n))


@settings(max_examples=200, deadline=None)
@given(n=lengths, size=sizes, count=worlds, num_skipped=st.integers(0, 12), drop_last=st.booleans(), kind=kinds)
def test_skipping_rounds_keeps_the_rest_unchanged(n, size, count, num_skipped, drop_last, kind):
    split = SampleSplit(size, count, drop_last)
    start = split.split_epoch(make_samples(n, kind))
    whole = [split.get_share(chunk, 0, start.opening) for chunk in start.rounds]
    start = split.split_epoch(make_samples(n, kind), num_skipped=num_skipped)
    assert [split.get_share(chunk, 0, start.opening) for chunk in start.rounds] == whole[num_skipped:]


@pytest.mark.parametrize(
    ("is_even", "expected"),
    [
        (True, [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]),
        (False, [[[0, 1], [4, 5]], [[2, 3], [6]]]),
    ],
)
def test_last_round_is_completed_from_the_start(is_even, expected):
    ranks = split_epoch(SampleSplit(2, 2, is_even=is_even), range(7))
    assert [[rows for rows, _ in rounds] for rounds in ranks] == expected
    assert [counts for _, counts in ranks[0]] == [(2, 2), (2, 1)]


def test_rank_without_samples_copies_the_first_batch_of_the_round():
    ranks = split_epoch(SampleSplit(4, 3, is_even=False), range(14))
    assert [rounds[-1] for rounds in ranks] == [([12, 13], (2, 0, 0))] * 3


def test_fewer_samples_than_one_round_are_repeated():
    ranks = split_epoch(SampleSplit(4, 2), range(3))
    assert ranks == [[([0, 1, 2, 0], (3, 0))], [([1, 2, 0, 1], (3, 0))]]


batches = st.lists(st.integers(1, 5), max_size=12).map(
    lambda lengths: [list(range(end - size, end)) for size, end in zip(lengths, itertools.accumulate(lengths))]
)


@settings(max_examples=400, deadline=None)
@given(order=batches, count=worlds, is_split=st.booleans(), drop_last=st.booleans(), is_even=st.booleans())
def test_ready_made_batches_of_any_size_come_once_and_in_order(order, count, is_split, drop_last, is_even):
    split = BatchSplit(count, is_split, drop_last, is_even)
    ranks = split_epoch(split, order)
    kept = order[: len(order) - len(order) % count] if drop_last and not is_split else order
    assert join_real_rows(ranks) == list(itertools.chain(*kept))
    assert {len(rounds) for rounds in ranks} == {split.count_rounds(len(order))}
    assert all(rows for rounds in ranks for rows, _ in rounds)
    if is_split and is_even:
        for parts in zip(*ranks):
            assert len({len(rows) for rows, _ in parts}) == 1


@settings(max_examples=200, deadline=None)
@given(order=batches, count=worlds, is_split=st.booleans(), consumed=st.integers(0, 60))
def test_ready_made_batches_resume_at_any_sample(order, count, is_split, consumed):
    samples = list(itertools.chain(*order))
    assert join_real_rows(split_epoch(BatchSplit(count, is_split), order, consumed)) == samples[consumed:]


@settings(max_examples=200, deadline=None)
@given(order=batches, count=worlds, is_split=st.booleans(), num_skipped=st.integers(0, 8))
def test_skipping_ready_made_rounds_counts_their_samples(order, count, is_split, num_skipped):
    split = BatchSplit(count, is_split)
    skipped = order[: num_skipped * (1 if is_split else count)]
    start = split.split_epoch(iter(order), num_skipped=num_skipped)
    assert start.consumed == sum(map(len, skipped))
    assert [rows for rows, _ in split_epoch(split, order, num_skipped=num_skipped)[0]] == [
        rows for rows, _ in split_epoch(split, order)[0]
    ][num_skipped:]


def test_ranks_without_a_ready_made_batch_take_the_first_ones():
    order = [[0, 1], [2, 3, 4], [5, 6], [7]]
    ranks = split_epoch(BatchSplit(3), order)
    assert [rounds[-1] for rounds in ranks] == [([7], (1, 0, 0)), ([0, 1], (1, 0, 0)), ([2, 3, 4], (1, 0, 0))]
    uneven = split_epoch(BatchSplit(3, is_even=False), order)
    assert [rounds[-1] for rounds in uneven] == [([7], (1, 0, 0))] * 3


def test_short_batch_of_a_known_size_is_completed():
    ranks = split_epoch(BatchSplit(2, size=3), [[0, 1, 2], [3, 4, 5], [6]])
    assert [rounds[-1] for rounds in ranks] == [([6, 0, 1], (1, 0)), ([0, 1, 2], (1, 0))]


def test_lists_of_a_sampler_are_never_changed():
    order = [[0, 1], [2]]
    split_epoch(BatchSplit(2, size=2), order)
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
    assert list(start.rounds) == [[[0, 1], [2, 3]], [[4, 5]]]


def test_find_offset_returns_the_first_sample_of_a_rank():
    assert [SampleSplit(4, 3).find_offset(range(12), rank) for rank in range(3)] == [0, 4, 8]
    assert [BatchSplit(3).find_offset([[1, 2], [3], [4, 5, 6]], rank) for rank in range(3)] == [0, 2, 3]


@given(st.lists(st.integers(), max_size=5))
def test_only_the_last_item_is_marked_last(items):
    assert list(mark_last(items)) == [(item, i == len(items) - 1) for i, item in enumerate(items)]


def test_fill_by_cycling_repeats_its_source():
    assert fill_by_cycling([9], [1, 2], 6) == [9, 1, 2, 1, 2, 1]
    assert fill_by_cycling([9, 8], [1], 1) == [9, 8]


@settings(max_examples=300, deadline=None)
@given(n=lengths, size=sizes, count=worlds, drop_last=st.booleans(), kind=kinds)
def test_spread_end_gives_equal_rows_and_repeats_fewer_rows_than_ranks(n, size, count, drop_last, kind):
    split = SampleSplit(size, count, drop_last, is_spread=True)
    ranks = []
    for rank in range(count):
        start = split.split_epoch(make_samples(n, kind))
        ranks.append([split.get_share(chunk, rank, start.opening) for chunk in start.rounds])
    expected = n - n % (size * count) if drop_last else n
    assert join_real_rows(ranks) == list(range(expected))
    for parts in zip(*ranks):
        assert len({len(rows) for rows, _ in parts}) == 1
        counts = parts[0][1]
        assert len(parts[0][0]) * count - sum(counts) < count


def test_spread_end_begins_where_the_previous_rank_ends():
    split = SampleSplit(4, 2, is_spread=True)
    assert [split.find_offset(range(5), rank) for rank in range(2)] == [0, 3]
    assert split.get_share(list(range(8, 13)), 1, [0, 1]) == ([11, 12, 0], (3, 2))


@st.composite
def make_window_splits(draw):
    window = draw(st.integers(1, 60))
    return WindowSplit(window, draw(st.integers(1, window)), draw(st.integers(1, 7)), draw(st.sampled_from([1, 1, 3])))


@given(make_window_splits(), st.integers(0, 300), st.booleans())
def test_samples_come_once_in_order_in_the_expected_number_of_rounds(split, length, is_iterator):
    order = list(range(length))
    begun = split.split_epoch(iter(order) if is_iterator else order)
    rounds = [list(each) for each in begun.rounds]
    kept = []
    for begin in range(0, length, split.window):
        part = order[begin : begin + split.window]
        kept += part if len(part) == split.window else part[: len(part) - len(part) % split.unit]
    assert list(chain(*rounds)) == kept
    assert len(rounds) == split.count_rounds(length)
    assert all(rounds)


@given(make_window_splits(), st.integers(1, 60))
def test_shares_are_even_with_real_rows_first(split, length):
    samples = list(range(length))
    shares = [split.get_share(samples, rank, []) for rank in range(split.count)]
    counts = shares[0][1]
    assert all(told == counts for _, told in shares)
    assert sum(counts) == length
    assert max(counts) - min(counts) <= 1
    assert list(chain(*(own[:count] for (own, _), count in zip(shares, counts)))) == samples
    assert [split.find_offset(samples, rank) for rank in range(split.count)] == [
        sum(counts[:r]) for r in range(split.count)
    ]
    assert all(len(own) == max(count, 1) for (own, _), count in zip(shares, counts))


@given(make_window_splits(), st.integers(0, 5), st.integers(0, 200))
def test_epoch_starts_at_a_window_or_after_skipped_rounds(split, number, length):
    order = list(range(length))
    rounds = [list(each) for each in split.split_epoch(order).rounds]
    at = split.split_epoch(order, consumed=number * split.window)
    flat = [s for s in chain(*rounds) if s >= number * split.window]
    assert list(chain(*at.rounds)) == flat
    assert at.consumed == number * split.window
    skipped = split.split_epoch(order, num_skipped=number)
    assert [list(each) for each in skipped.rounds] == rounds[number:]
    assert skipped.consumed == sum(map(len, rounds[:number]))


@pytest.mark.parametrize(("window", "rounds", "count", "wanted"), [
    (16, 1, 3, [[5, 5, 6]]),
    (16, 3, 3, [[1, 2, 2], [1, 2, 2], [2, 2, 2]]),
    (2, 1, 3, [[0, 1, 1]]),
])  # fmt: skip
def test_counts_of_some_windows(window, rounds, count, wanted):
    split = WindowSplit(window, rounds, count)
    found = [list(split.get_share(each, 0, [])[1]) for each in split.split_epoch(range(window)).rounds]
    assert found == wanted
    assert split.round_size == (window if rounds == 1 else None)
