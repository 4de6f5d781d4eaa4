"""Test the numbers of a report as text: values by unit, short numbers and durations."""

import math

import pytest

from headway.core.tracking.report.number_formats import format_duration, format_short, format_value


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (None, "number", "-"), (2, "number", "2"), (2.0, "number", "2"), (1.99991, "number", "2.000"), (0.5, "number", "0.5"),
        (1234.5, "number", "1,234.50"), (1e-5, "number", "1e-5"), (0, "number", "0"), (math.nan, "number", "nan"),
        (math.inf, "bytes", "inf"), (-math.inf, "rate", "-inf"), (10**400, "number", "inf"), (-(10**400), "number", "-inf"),
        (1536, "bytes", "1.5 KiB"), (0.0403, "share", "4.03%"), (52345.0, "rate", "52.3k"), (3725, "seconds", "1 h 2 min"),
    ],
)  # fmt: skip
def test_values_are_formatted_by_unit(value, unit, expected):
    assert format_value(value, unit) == expected


def test_large_numbers_are_shortened():
    values = (999, 1500, 999_999, 2.5e6, 3e9, 1e20)
    assert [format_short(value) for value in values] == ["999", "1.5k", "1M", "2.5M", "3G", "1e20"]


def test_durations_are_formatted():
    values = (0, 0.25, 59, 60, 3725, 90061)
    assert [format_duration(value) for value in values] == ["0 s", "0.25 s", "59 s", "1 min", "1 h 2 min", "1 d 1 h"]
