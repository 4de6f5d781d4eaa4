import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.data.sampling.shard import BatchSplit, SampleSplit, fill_by_cycling, mark_last


def epoch_of(split, order, consumed=0, num_skipped=0):
    """For each rank, the (rows, counts) of every round."""
    ranks = []
    for rank in range(split.count):
        start = split.split_epoch(iter(order) if isinstance(split, BatchSplit) else order, consumed, num_skipped)
        ranks.append([split.get_share(chunk, rank, start.opening) for chunk in start.rounds])
    return ranks


def real_rows(ranks):
    """The valid rows of all rounds, rank after rank within a round."""
    out = []
    for parts in zip(*ranks, strict=True):
        assert len({counts for _, counts in parts}) == 1
        for rank, (rows, counts) in enumerate(parts):
            out += rows[: counts[rank]]
    return out


def as_kind(n, kind):
    return range(n) if kind == "sequence" else iter(range(n))


sizes = st.integers(1, 7)
worlds = st.integers(1, 5)
lengths = st.integers(0, 50)
kinds = st.sampled_from(["sequence", "iterator"])


@settings(max_examples=400, deadline=None)
@given(n=lengths, size=sizes, count=worlds, drop_last=st.booleans(), is_even=st.booleans(), kind=kinds)
def test_every_real_sample_comes_once_and_in_order(n, size, count, drop_last, is_even, kind):
    split = SampleSplit(size, count, drop_last, is_even)
    ranks = []
    for rank in range(count):
        start = split.split_epoch(as_kind(n, kind))
        ranks.append([split.get_share(chunk, rank, start.opening) for chunk in start.rounds])
    expected = n - n % (size * count) if drop_last else n
    assert real_rows(ranks) == list(range(expected))
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
def test_an_epoch_goes_on_at_any_sample(n, size, count, consumed, kind):
    split = SampleSplit(size, count)
    consumed = min(consumed, n)
    ranks = []
    for rank in range(count):
        start = split.split_epoch(as_kind(n, kind), consumed)
        assert start.consumed == consumed
        assert start.opening == list(range(min(n, size * count)))
        ranks.append([split.get_share(chunk, rank, start.opening) for chunk in start.rounds])
    assert real_rows(ranks) == list(range(consumed, n))


@settings(max_examples=200, deadline=None)
@given(n=lengths, size=sizes, count=worlds, num_skipped=st.integers(0, 12), drop_last=st.booleans(), kind=kinds)
def test_skipping_rounds_leaves_the_rest_as_it_was(n, size, count, num_skipped, drop_last, kind):
    split = SampleSplit(size, count, drop_last)
    start = split.split_epoch(as_kind(n, kind))
    whole = [split.get_share(chunk, 0, start.opening) for chunk in start.rounds]
    start = split.split_epoch(as_kind(n, kind), num_skipped=num_skipped)
    assert [split.get_share(chunk, 0, start.opening) for chunk in start.rounds] == whole[num_skipped:]


@pytest.mark.parametrize(
    ("is_even", "expected"),
    [
        (True, [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]),
        (False, [[[0, 1], [4, 5]], [[2, 3], [6]]]),
    ],
)
def test_the_last_round_is_completed_from_the_start(is_even, expected):
    ranks = epoch_of(SampleSplit(2, 2, is_even=is_even), range(7))
    assert [[rows for rows, _ in rounds] for rounds in ranks] == expected
    assert [counts for _, counts in ranks[0]] == [(2, 2), (2, 1)]


def test_a_rank_without_samples_copies_the_rounds_first_batch():
    ranks = epoch_of(SampleSplit(4, 3, is_even=False), range(14))
    assert [rounds[-1] for rounds in ranks] == [([12, 13], (2, 0, 0))] * 3


def test_fewer_samples_than_one_round_repeat_over_and_over():
    ranks = epoch_of(SampleSplit(4, 2), range(3))
    assert ranks == [[([0, 1, 2, 0], (3, 0))], [([1, 2, 0, 1], (3, 0))]]


batches = st.lists(st.integers(1, 5), max_size=12).map(
    lambda lengths: [list(range(end - size, end)) for size, end in zip(lengths, itertools.accumulate(lengths))]
)


@settings(max_examples=400, deadline=None)
@given(order=batches, count=worlds, is_split=st.booleans(), drop_last=st.booleans(), is_even=st.booleans())
def test_ready_made_batches_of_any_size_come_once_and_in_order(order, count, is_split, drop_last, is_even):
    split = BatchSplit(count, is_split, drop_last, is_even)
    ranks = epoch_of(split, order)
    kept = order[: len(order) - len(order) % count] if drop_last and not is_split else order
    assert real_rows(ranks) == list(itertools.chain(*kept))
    assert {len(rounds) for rounds in ranks} == {split.count_rounds(len(order))}
    assert all(rows for rounds in ranks for rows, _ in rounds)
    if is_split and is_even:
        for parts in zip(*ranks):
            assert len({len(rows) for rows, _ in parts}) == 1


@settings(max_examples=200, deadline=None)
@given(order=batches, count=worlds, is_split=st.booleans(), consumed=st.integers(0, 60))
def test_ready_made_batches_go_on_at_any_sample(order, count, is_split, consumed):
    samples = list(itertools.chain(*order))
    assert real_rows(epoch_of(BatchSplit(count, is_split), order, consumed)) == samples[consumed:]


@settings(max_examples=200, deadline=None)
@given(order=batches, count=worlds, is_split=st.booleans(), num_skipped=st.integers(0, 8))
def test_skipping_ready_made_rounds_counts_their_samples(order, count, is_split, num_skipped):
    split = BatchSplit(count, is_split)
    skipped = order[: num_skipped * (1 if is_split else count)]
    start = split.split_epoch(iter(order), num_skipped=num_skipped)
    assert start.consumed == sum(map(len, skipped))
    assert [rows for rows, _ in epoch_of(split, order, num_skipped=num_skipped)[0]] == [
        rows for rows, _ in epoch_of(split, order)[0]
    ][num_skipped:]


def test_ranks_without_a_ready_made_batch_take_the_first_ones():
    order = [[0, 1], [2, 3, 4], [5, 6], [7]]
    ranks = epoch_of(BatchSplit(3), order)
    assert [rounds[-1] for rounds in ranks] == [([7], (1, 0, 0)), ([0, 1], (1, 0, 0)), ([2, 3, 4], (1, 0, 0))]
    uneven = epoch_of(BatchSplit(3, is_even=False), order)
    assert [rounds[-1] for rounds in uneven] == [([7], (1, 0, 0))] * 3


def test_a_short_batch_of_a_known_size_is_completed():
    ranks = epoch_of(BatchSplit(2, size=3), [[0, 1, 2], [3, 4, 5], [6]])
    assert [rounds[-1] for rounds in ranks] == [([6, 0, 1], (1, 0)), ([0, 1, 2], (1, 0))]


def test_a_samplers_own_lists_are_never_changed():
    order = [[0, 1], [2]]
    epoch_of(BatchSplit(2, size=2), order)
    assert order == [[0, 1], [2]]


def test_a_sampler_may_go_on_using_its_list():
    def reusing():
        batch = []
        for row in range(6):
            batch.append(row)
            if len(batch) == 2:
                yield batch
                batch.clear()

    start = BatchSplit(2).split_epoch(reusing())
    assert list(start.rounds) == [[[0, 1], [2, 3]], [[4, 5]]]


def test_offset_is_where_a_ranks_samples_stand_in_the_round():
    assert [SampleSplit(4, 3).find_offset(range(12), rank) for rank in range(3)] == [0, 4, 8]
    assert [BatchSplit(3).find_offset([[1, 2], [3], [4, 5, 6]], rank) for rank in range(3)] == [0, 2, 3]


@given(st.lists(st.integers(), max_size=5))
def test_only_the_last_is_marked_last(items):
    assert list(mark_last(items)) == [(item, i == len(items) - 1) for i, item in enumerate(items)]


def test_fill_repeats_its_source():
    assert fill_by_cycling([9], [1, 2], 6) == [9, 1, 2, 1, 2, 1]
    assert fill_by_cycling([9, 8], [1], 1) == [9, 8]


@settings(max_examples=300, deadline=None)
@given(n=lengths, size=sizes, count=worlds, drop_last=st.booleans(), kind=kinds)
def test_a_spread_end_gives_each_rank_as_many_rows_and_repeats_less_than_a_row_each(n, size, count, drop_last, kind):
    split = SampleSplit(size, count, drop_last, is_spread=True)
    ranks = []
    for rank in range(count):
        start = split.split_epoch(as_kind(n, kind))
        ranks.append([split.get_share(chunk, rank, start.opening) for chunk in start.rounds])
    expected = n - n % (size * count) if drop_last else n
    assert real_rows(ranks) == list(range(expected))
    for parts in zip(*ranks):
        assert len({len(rows) for rows, _ in parts}) == 1
        counts = parts[0][1]
        assert len(parts[0][0]) * count - sum(counts) < count


def test_a_spread_end_begins_where_the_rank_before_ends():
    split = SampleSplit(4, 2, is_spread=True)
    assert [split.find_offset(range(5), rank) for rank in range(2)] == [0, 3]
    assert split.get_share(list(range(8, 13)), 1, [0, 1]) == ([11, 12, 0], (3, 2))
