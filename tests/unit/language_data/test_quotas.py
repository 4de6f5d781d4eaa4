"""Test the order of a mixture's sources: each share within one sample at every prefix, and access to any position."""

import random
from fractions import Fraction

import pytest

from headway.language_data.quotas import QuotaOrder, build_weight_ranges, limit_weight_ranges


def scale_to_shares(values):
    values = [Fraction(repr(value)) for value in values]
    return [value / sum(values) for value in values]


def sum_shares(starts, rows, position):
    """Sum the weights of all positions before this one, piece by piece."""
    ends = [*starts[1:], None]
    shares = [Fraction(0)] * len(rows[0])
    for start, end, row in zip(starts, ends, rows):
        steps = max(0, (position if end is None else min(position, end)) - start)
        shares = [share + weight * steps for share, weight in zip(shares, row)]
    return shares


def read_order(order, length):
    sources = []
    while len(sources) < length:
        block = order.compute_block(len(sources) // order.block_size)
        assert block.start == len(sources)
        assert list(block.counts) == [sources.count(source) for source in range(order.num_sources)]
        sources += block.sources
    return sources[:length]


def measure_largest_error(sources, starts, rows):
    """Return the largest difference between a source's count and its share at any prefix."""
    counts = [0] * len(rows[0])
    shares = [Fraction(0)] * len(rows[0])
    largest = Fraction(0)
    number = 0
    for position, source in enumerate(sources):
        while number + 1 < len(starts) and starts[number + 1] <= position:
            number += 1
        counts[source] += 1
        shares = [share + weight for share, weight in zip(shares, rows[number])]
        largest = max(largest, *(abs(count - share) for count, share in zip(counts, shares)))
    return largest


def draw_weights(draw, number):
    kind = draw.choice(["even", "tenths", "any", "skewed"])
    if kind == "even":
        return [1.0] * number
    if kind == "tenths":
        return [draw.randint(1, 9) / 10 for _ in range(number)]
    return [draw.random() ** (1 if kind == "any" else 3) + 0.002 for _ in range(number)]


@pytest.mark.parametrize("number", [1, 2, 3, 5, 8, 17, 60])
def test_every_prefix_holds_each_share_within_one_sample(number):
    draw = random.Random(number)
    for _ in range(2):
        row = scale_to_shares(draw_weights(draw, number))
        sources = read_order(QuotaOrder(build_weight_ranges([0], [row])), 2500 if number < 10 else 1200)
        assert measure_largest_error(sources, [0], [row]) < 1


@pytest.mark.parametrize("seed", [3, 8, pytest.param(range(20, 60), marks=pytest.mark.matrix)])
def test_changing_weights_hold_the_sum_of_the_shares_within_one_sample(seed):
    for each in [seed] if isinstance(seed, int) else seed:
        check_schedule(random.Random(each))


def check_schedule(draw):
    number = draw.choice([2, 3, 4, 9])
    starts, rows = [0], []
    for _ in range(draw.choice([2, 3, 6])):
        values = draw_weights(draw, number)
        for source in draw.sample(range(number), draw.randrange(number)):
            values[source] = 0
        rows.append(scale_to_shares(values))
        starts.append(starts[-1] + draw.randint(1, 1200))
    starts = starts[: len(rows)]
    weight_ranges = build_weight_ranges(starts, rows)
    assert measure_largest_error(read_order(QuotaOrder(weight_ranges), 4000), starts, rows) < 1


@pytest.mark.parametrize("seed", range(10))
def test_dropped_sources_give_each_sample_once(seed):
    draw = random.Random(seed)
    number = draw.choice([1, 2, 3, 7, 20])
    row = scale_to_shares(draw_weights(draw, number))
    limits = [draw.randint(1, 700) for _ in range(number)]
    weight_ranges, end = limit_weight_ranges(build_weight_ranges([0], [row]), limits)
    assert end == sum(limits)
    sources = read_order(QuotaOrder(weight_ranges, end), end)
    assert [sources.count(source) for source in range(number)] == limits
    # Until the first source ends, the given weights hold.
    first = min(int(limit / weight) for limit, weight in zip(limits, row))
    if first:
        assert measure_largest_error(sources[:first], [0], [row]) < 1


def test_source_without_a_limit_replaces_one_that_ends():
    weight_ranges, end = limit_weight_ranges(build_weight_ranges([0], [scale_to_shares([0.5, 0.5])]), [10, None])
    assert end is None
    sources = read_order(QuotaOrder(weight_ranges), 100)
    assert (sources.count(0), sources.count(1)) == (10, 90)
    assert set(sources[21:]) == {1}


@pytest.mark.parametrize("weights", [[0.5, 0.3, 0.2], [0.123456, 0.654321, 0.3], [0.002, 0.4, 0.598]])
def test_distant_position_equals_that_of_an_order_read_from_the_start(weights):
    row = scale_to_shares(weights)
    whole = read_order(QuotaOrder(build_weight_ranges([0], [row])), 20_000)
    fresh = QuotaOrder(build_weight_ranges([0], [row]))
    for position in (19_000, 7, 12_345):
        block = fresh.compute_block(position // fresh.block_size)
        assert block.sources[position - block.start] == whole[position]
        assert fresh.count_samples(position) == [whole[:position].count(source) for source in range(3)]
        number = whole[:position].count(1)
        assert fresh.find_sample_position(1, number) == next(at for at in range(position, 20_000) if whole[at] == 1)
    far = fresh.compute_block(10**9 // fresh.block_size)
    shares = sum_shares([0], [row], far.start)
    assert sum(far.counts) == far.start
    assert max(abs(count - share) for count, share in zip(far.counts, shares)) < 1
