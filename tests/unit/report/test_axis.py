import math
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.report.axis import duration, short, text, tick_text, ticks

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@unhurried
@given(st.floats(-1e12, 1e12), st.floats(1e-6, 1e12), st.sampled_from(["number", "bytes", "share", "seconds", "step"]))
def test_ticks_lie_inside_at_equal_distances(low, width, unit):
    high = low + width
    found = ticks(low, high, 5, unit)
    if (unit == "step" and width < 2) or width < 1e-9 * max(abs(low), abs(high)):
        return
    assert 1 <= len(found) <= 12
    slack = width * 1e-6
    assert all(low - slack <= value <= high + slack for value in found)
    distances = [b - a for a, b in pairwise(found)]
    assert all(math.isclose(each, distances[0], rel_tol=1e-3) for each in distances)
    assert unit != "step" or all(value == int(value) for value in found)


@pytest.mark.parametrize(
    ("low", "high", "unit", "expected"),
    [
        (0, 10, "number", ["0", "2.5", "5.0", "7.5", "10.0"]),
        (0, 3.1e-4, "number", ["0", "1e-4", "2e-4", "3e-4"]),
        (0, 3 * 1024**3, "bytes", ["0 B", "1 GiB", "2 GiB", "3 GiB"]),
        (0, 1.9 * 1024**3, "bytes", ["0 B", "512 MiB", "1 GiB", "1.5 GiB"]),
        (0, 0.4, "share", ["0%", "10%", "20%", "30%", "40%"]),
        (0, 7200, "seconds", ["0 s", "30 min", "1 h", "1 h 30 min", "2 h"]),
        (0, 60000, "step", ["0", "20k", "40k", "60k"]),
        (1, 3, "step", ["1", "2", "3"]),
        (-1, 1, "number", ["-1.0", "-0.5", "0", "0.5", "1.0"]),
    ],
)  # fmt: skip
def test_tick_labels(low, high, unit, expected):
    places = ticks(low, high, 4, unit)
    assert [tick_text(value, places[1] - places[0], unit) for value in places] == expected


def test_an_axis_without_width_has_one_tick():
    assert ticks(3.0, 3.0) == [3.0]
    assert ticks(0.0, math.inf) == [0.0]


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (None, "number", "-"), (2, "number", "2"), (2.0, "number", "2"), (1.99991, "number", "2.000"), (0.5, "number", "0.5"),
        (1234.5, "number", "1,234.50"), (1e-5, "number", "1e-5"), (0, "number", "0"), (math.nan, "number", "nan"),
        (math.inf, "bytes", "inf"), (-math.inf, "rate", "-inf"), (10**400, "number", "inf"), (-(10**400), "number", "-inf"),
        (1536, "bytes", "1.5 KiB"), (0.0403, "share", "4.03%"), (52345.0, "rate", "52.3k"), (3725, "seconds", "1 h 2 min"),
    ],
)  # fmt: skip
def test_values_for_reading(value, unit, expected):
    assert text(value, unit) == expected


def test_large_numbers_are_shortened():
    values = (999, 1500, 999_999, 2.5e6, 3e9, 1e20)
    assert [short(value) for value in values] == ["999", "1.5k", "1M", "2.5M", "3G", "1e20"]


def test_durations():
    values = (0, 0.25, 59, 60, 3725, 90061)
    assert [duration(value) for value in values] == ["0 s", "0.25 s", "59 s", "1 min", "1 h 2 min", "1 d 1 h"]
