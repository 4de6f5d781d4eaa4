"""Test the downsampling of series: extremes, ends, gaps and non-finite values are kept."""

import math

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.core.tracking.report.series import MAX_MARKS, downsample

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
finite = st.floats(allow_nan=False, allow_infinity=False)
anything = st.floats()


def make_points(values):
    return [(float(index), index * 0.5, value) for index, value in enumerate(values)]


def list_lows(series):
    return [value for value in series.lows or series.means if value is not None]


def list_highs(series):
    return [value for value in series.highs or series.means if value is not None]


@unhurried
@given(st.lists(anything, min_size=1, max_size=300), st.integers(2, 40))
def test_extremes_ends_and_gaps_are_kept(values, limit):
    known = [value for value in values if math.isfinite(value)]
    series = downsample(make_points(values), limit)
    assert len(series.means) <= limit
    assert series.count == len(values)
    assert (series.steps[0], series.steps[-1]) == (0.0, len(values) - 1.0)
    assert series.steps == sorted(series.steps)
    assert sum(mark.count for mark in series.marks) == len(values) - len(known)
    assert series.find_bounds() == ((min(known), max(known)) if known else None)
    for low, mean, high in zip(series.lows, series.means, series.highs):
        assert (low is None) == (mean is None) == (high is None)
        # A mean of equal values may be a rounding error away from them.
        assert mean is None or low - abs(low) * 1e-9 - 1e-300 <= mean <= high + abs(high) * 1e-9 + 1e-300


@unhurried
@given(st.lists(finite, min_size=1, max_size=100))
def test_short_series_is_unchanged(values):
    series = downsample(make_points(values), 100)
    assert series.means == values
    assert not series.lows


def test_each_bucket_has_its_own_values():
    series = downsample(make_points([float(value) for value in range(1000)]), 10)
    assert series.lows == [0, 100, 200, 300, 400, 500, 600, 700, 800, 900]
    assert series.highs == [99, 199, 299, 399, 499, 599, 699, 799, 899, 999]
    assert series.means == [49.5 + 100 * index for index in range(10)]


def test_consecutive_non_finite_values_are_one_mark():
    nan, inf = math.nan, math.inf
    series = downsample(make_points([1, nan, nan, inf, 2, -inf]), 100)
    assert [(mark.kind, mark.steps, mark.count) for mark in series.marks] == [
        ("nan", (1.0, 2.0), 2), ("inf", (3.0, 3.0), 1), ("-inf", (5.0, 5.0), 1),
    ]  # fmt: skip
    assert series.means == [1, None, None, None, 2, None]


def test_many_marks_are_merged_and_all_values_counted():
    values = [math.nan if index % 2 else 1.0 for index in range(5000)]
    series = downsample(make_points(values), 100)
    assert len(series.marks) == MAX_MARKS
    assert sum(mark.count for mark in series.marks) == 2500
    assert {mark.kind for mark in series.marks} == {"nan"}
