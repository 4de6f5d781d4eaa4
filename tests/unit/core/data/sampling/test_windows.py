"""Ragged windows: every sample once, in order, as evenly as can be, in the same windows on any number of ranks."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.data.sampling.shard import WindowSplit


@st.composite
def splits(draw):
    window = draw(st.integers(1, 60))
    return WindowSplit(window, draw(st.integers(1, window)), draw(st.integers(1, 7)), draw(st.sampled_from([1, 1, 3])))


@given(splits(), st.integers(0, 300), st.booleans())
def test_every_sample_once_in_order_and_rounds_as_told(split, length, is_iterator):
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


@given(splits(), st.integers(1, 60))
def test_shares_are_even_real_first_and_add_up(split, length):
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


@given(splits(), st.integers(0, 5), st.integers(0, 200))
def test_a_start_at_a_window_or_after_rounds_is_the_rest(split, number, length):
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
def test_by_hand(window, rounds, count, wanted):
    split = WindowSplit(window, rounds, count)
    found = [list(split.get_share(each, 0, [])[1]) for each in split.split_epoch(range(window)).rounds]
    assert found == wanted
    assert split.round_size == (window if rounds == 1 else None)
