"""Test how sizes, durations and numbers are read and formatted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.common.text import format_bytes, format_number, format_seconds, parse_bytes
from headway.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (7, 7),
        ("7", 7),
        ("10GB", 10**10),
        ("10 gib", 10 * 2**30),
        ("1.5KiB", 1536),
        ("500 MB", 5 * 10**8),
        ("3b", 3),
        ("0", 0),
    ],
)
def test_sizes_are_parsed(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", [-1, True, 1.5, None, "", "GB", "1 XB", "-3MB", "1e3", "1,5GB"])
def test_invalid_size_is_refused(text):
    with pytest.raises(ConfigError):
        parse_bytes(text)


def test_sizes_are_formatted():
    assert [format_bytes(n) for n in (0, 1023, 1536, 2**20, 3 * 2**30, 2**50)] == [
        "0 B", "1023 B", "1.5 KiB", "1.0 MiB", "3.0 GiB", "1024.0 TiB",
    ]  # fmt: skip


@given(st.integers(0, 2**44))
def test_formatted_size_parses_back_approximately(size):
    assert abs(parse_bytes(format_bytes(size)) - size) <= max(1, size * 0.051)


def test_durations_are_formatted():
    assert [format_seconds(s) for s in (-1, 4.9, 65, 3725, 360000)] == ["0:00", "0:04", "1:05", "1:02:05", "100:00:00"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(33912.7, "33,900"), (1.36e5, "136,000"), (101.4, "101"), (7.9, "7.9"), (13.0, "13"), (0.01234, "0.0123"), (999.7, "1,000"),
     (2.5e-7, "0.00000025"), (0, "0"), (-4567, "-4,570"), (float("inf"), "inf")],
)  # fmt: skip
def test_numbers_have_three_digits_and_no_exponent(value, text):
    assert format_number(value) == text
