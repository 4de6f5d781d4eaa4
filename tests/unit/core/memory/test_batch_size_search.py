from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import find_executable_batch_size
from headway.core.memory.batch_size import FirstThatFits, LargestSize, list_divisors
from headway.errors import ConfigError


def run(search, largest):
    """All sizes tried when exactly those up to `largest` fit."""
    tried = []
    while not search.is_done:
        assert search.size >= 1
        tried.append(search.size)
        search.report(search.size <= largest)
    return tried


def test_halving_is_the_default():
    search = FirstThatFits(1024)
    assert run(search, 8) == [1024, 512, 256, 128, 64, 32, 16, 8]
    assert search.found == 8
    search = FirstThatFits(128)
    assert run(search, 7) == [128, 64, 32, 16, 8, 4]
    search = FirstThatFits(1)
    assert run(search, 0) == [1]
    assert (search.found, search.size) == (0, 0)


def test_the_largest_is_found_exactly():
    search = LargestSize(128)
    assert run(search, 7) == [128, 127, 119, 59, 29, 14, 7, 10, 8]
    assert (search.found, search.size) == (7, 7)
    search = LargestSize(1024)
    assert len(run(search, 8)) == 14
    assert search.found == 8
    search = LargestSize(16, limit=100)
    assert run(search, 10**9) == [16, 17, 25, 50, 100]
    assert search.found == 100
    search = LargestSize(2)
    assert run(search, 0) == [2, 1]
    assert (search.found, search.size) == (0, 0)


@given(start=st.integers(1, 5000), largest=st.integers(0, 9000), limit=st.integers(5000, 10_000))
def test_largest_is_right_and_cheap(start, largest, limit):
    search = LargestSize(start, limit=limit)
    tried = run(search, largest)
    assert search.found == min(largest, limit)
    assert len(set(tried)) == len(tried)
    farthest = max(start, largest, 1)
    assert len(tried) <= 2 * ceil(log2(farthest + 1)) + 2


@given(start=st.integers(1, 5000), largest=st.integers(0, 9000), tolerance=st.floats(0, 0.5))
def test_a_tolerance_is_kept_and_saves_tries(start, largest, tolerance):
    search = LargestSize(start, limit=10_000, tolerance=tolerance)
    tried = run(search, largest)
    assert search.found <= largest <= max(search.found, int(search.found * (1 + tolerance)))
    assert len(set(tried)) == len(tried)
    assert len(tried) <= 2 * ceil(log2(max(start, largest, 1) + 1)) + 2


@pytest.mark.parametrize(
    ("start", "largest", "tried"),
    [(128, 128, [128, 134]), (128, 133, [128, 134]), (128, 125, [128, 122]), (16, 16, [16, 17]), (5, 4, [5, 4])],
)
def test_a_start_near_the_answer_takes_two_tries(start, largest, tried):
    assert run(LargestSize(start, tolerance=0.05), largest) == tried


def test_a_tolerance_is_a_share():
    for wrong in (-0.1, 1, "5%", True):
        with pytest.raises(ConfigError, match="as a share"):
            find_executable_batch_size(search="largest", tolerance=wrong)


@given(number=st.integers(1, 5000), largest=st.integers(0, 6000), data=st.data())
def test_only_the_allowed_sizes_are_tried(number, largest, data):
    sizes = list_divisors(number)
    assert sizes == [each for each in range(1, number + 1) if number % each == 0]
    fitting = [each for each in sizes if each <= largest]
    search = LargestSize(number, limit=number, sizes=sizes)
    assert set(run(search, largest)) <= set(sizes)
    assert search.found == (fitting[-1] if fitting else 0)
    first = FirstThatFits(number, sizes=sizes)
    assert set(run(first, largest)) <= set(sizes)
    assert first.found <= search.found
    assert bool(first.found) == bool(fitting)


@given(start=st.integers(1, 2000), largest=st.integers(0, 2000))
def test_a_custom_reduce_function_chooses_the_sizes(start, largest):
    search = FirstThatFits(start, lambda size: size - 3)
    tried = run(search, largest)
    assert tried == list(range(start, 0, -3))[: len(tried)]
    assert search.found == next((size for size in range(start, 0, -3) if size <= largest), 0)
    left = iter(range(start - 1, -1, -1))
    without_argument = FirstThatFits(start, lambda: next(left))
    run(without_argument, largest)
    assert without_argument.found == min(start, largest)


@pytest.mark.parametrize("returned", [8, 9, 2.0, None, True, "4"])
def test_a_size_that_is_not_smaller_is_refused(returned):
    search = FirstThatFits(8, lambda: returned)
    if returned is True:
        with pytest.raises(ConfigError, match="returned True"):
            search.report(False)
        return
    with pytest.raises(ConfigError, match="after a batch size of 8"):
        search.report(False)


def test_below_zero_is_zero():
    search = FirstThatFits(8, lambda size: size - 100)
    search.report(False)
    assert search.is_done
    assert search.size == 0


@pytest.mark.parametrize("bad", [0, -1, 1.5, "8", True, None])
def test_sizes_are_checked(bad):
    with pytest.raises(ConfigError, match="starting_batch_size"):
        find_executable_batch_size(starting_batch_size=bad)
    if bad is not None:  # no limit of one's own
        with pytest.raises(ConfigError, match="max_batch_size"):
            find_executable_batch_size(starting_batch_size=4, max_batch_size=bad)


def test_a_limit_below_the_start_is_refused():
    with pytest.raises(ConfigError, match="below starting_batch_size=8"):
        find_executable_batch_size(starting_batch_size=8, search="largest", max_batch_size=4)
