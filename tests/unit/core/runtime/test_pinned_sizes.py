"""Test how arenas of pinned memory are planned for tensors of any sizes."""

import hypothesis.strategies as st
from hypothesis import given, settings

from headway.core.runtime.pinned_sizes import MAX_ARENA_BYTES, plan_arenas, split_into_powers_of_two


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3 * MAX_ARENA_BYTES), max_size=40), st.integers(0, 20 * MAX_ARENA_BYTES))
def test_arenas_are_powers_of_two_within_the_limit(sizes, limit):
    found = list(plan_arenas(sizes, limit))
    assert [index for _, part in found for index, _ in part] == list(range(sum(len(part) for _, part in found)))
    assert sum(num_bytes for num_bytes, _ in found) <= limit
    for num_bytes, part in found:
        assert num_bytes & (num_bytes - 1) == 0
        ends = [start + sizes[index] for index, start in part]
        assert all(end <= start for end, (_, start) in zip(ends, part[1:]))
        assert ends[-1] <= num_bytes
        assert num_bytes <= MAX_ARENA_BYTES or any(sizes[index] > MAX_ARENA_BYTES for index, _ in part)
    if limit > 4 * sum(max(size, 256) for size in sizes):
        assert sum(len(part) for _, part in found) == len(sizes)


@given(st.integers(1, 3 * MAX_ARENA_BYTES))
def test_pieces_waste_less_than_an_eighth(size):
    found = split_into_powers_of_two(size)
    assert sum(found) == size
    assert len(found) <= 4
    assert sum(1 << (piece - 1).bit_length() for piece in found) <= 9 * size // 8 + 1


def test_rounding_wastes_little_for_a_model():
    layers = [size for _ in range(32) for size in (4 * [4096 * 4096 * 2] + 3 * [4096 * 11008 * 2])]
    assert sum(num_bytes for num_bytes, _ in plan_arenas(layers, 1 << 40)) < 1.08 * sum(
        layers
    )  # one arena per tensor would take 1.33
