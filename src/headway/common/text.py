"""Parsing and formatting of names, sizes, numbers and durations, and formatting of plain-text tables."""

import math
import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from headway.errors import ConfigError


def join_names(names: Sequence[str], max_names: int = 5) -> str:
    """Join the first `max_names` names with commas, and append the number of further names, if any."""
    text = ", ".join(names[:max_names])
    num_more = len(names) - max_names
    return f"{text} and {num_more} more" if num_more > 0 else text


def format_ranges(numbers: Iterable[int]) -> str:
    """Format integers as ranges: [0, 1, 2, 5] -> '0-2, 5'."""
    texts = []
    # In a run of consecutive numbers, the difference between number and index is constant.
    for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        texts.append(f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0]))
    return ", ".join(texts)


def format_columns(rows: Sequence[Sequence[str]], align: str = "<") -> list[str]:
    """Format rows of cells as aligned lines of text, with two spaces between columns.

    Args:
        rows: Rows with equal numbers of cells.
        align: "<" to align cells left, ">" to align them right.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows)]
    return ["  ".join(f"{cell:{align}{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows]


_PREFIXES = list(enumerate("kmgt", 1))
_FACTORS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 10 ** (3 * power) for power, letter in _PREFIXES},
    **{f"{letter}ib": 2 ** (10 * power) for power, letter in _PREFIXES},
}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*")


def parse_bytes(size: int | str) -> int:
    """Convert `"10GiB"`, `"500 MB"` or a plain number to bytes.

    KB, MB, GB and TB are powers of 1000; KiB, MiB, GiB and TiB are powers of 1024. Case is ignored.

    Raises:
        ConfigError: If the text is not a size, or the size is negative.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise ConfigError(f"a size of {size} bytes is negative; give 0 or more")
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None or match[2].lower() not in _FACTORS:
        units = "KB, MB, GB, TB, KiB, MiB, GiB, TiB"
        raise ConfigError(
            f"{size!r} is not a size; write a number of bytes, or a number with one of {units}, such as '10GiB'"
        )
    return int(float(match[1]) * _FACTORS[match[2].lower()])


def format_bytes(size: float) -> str:
    """Format a number of bytes in binary units: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_number(value: float) -> str:
    """Format a number with three significant digits and no exponent: 33912.7 -> '33,900', 0.01234 -> '0.0123'.

    Trailing zeros after the decimal point are removed. Infinity and NaN become 'inf' and 'nan'.
    """
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    digits = 2 - math.floor(math.log10(abs(value)))
    rounded = round(value, digits)
    return f"{rounded:,.0f}" if digits <= 0 else f"{rounded:,.{digits}f}".rstrip("0").rstrip(".")


def format_seconds(seconds: float) -> str:
    """Format a duration in seconds: 3725 -> '1:02:05', 65 -> '1:05', 4.2 -> '0:04'."""
    whole = max(0, int(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
