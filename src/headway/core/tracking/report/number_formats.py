"""Numbers of a report as text for people: short numbers, bytes, percentages, durations and rates.

`script.js` has equal functions for the charts. Change both together.
"""

import sys

from headway.common.text import format_bytes


def _format_exponent(value: float) -> str:
    """Return a very large or small number with an exponent, such as "1.5e-7"."""
    mantissa, _, power = f"{value:.2e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}e{int(power)}"


def format_short(value: float) -> str:
    """Return a number as short text, as in '12.5k' for 12500."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:  # includes values that would round to 1000 of the smaller unit
            scaled = value / size
            return f"{scaled:.3g}{letter}" if abs(scaled) < 999 else _format_exponent(value)
    return f"{value:.4g}"


def format_value(value: float | None, unit: str = "number") -> str:
    """Return a value as short text with its unit. Small fractional numbers have four significant digits.

    Args:
        value: Value to format; None for a dash.
        unit: "number", "bytes", "share" (a fraction, shown in percent), "seconds" or "rate". Rates from 10,000 on are
            abbreviated, as in "12.5k". Default: "number".
    """
    if value is None:
        return "-"
    if value != value:
        return "nan"
    if abs(value) > sys.float_info.max:  # also for integers beyond the range of floats
        return "inf" if value > 0 else "-inf"
    if unit == "bytes":
        return format_bytes(value)
    if unit == "share":
        return f"{value * 100:.3g}%"
    if unit == "seconds":
        return format_duration(value)
    if unit == "rate" and abs(value) >= 10_000:
        return format_short(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e9:
        return _format_exponent(value)
    if value == int(value):
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.2f}"
    brief = f"{value:.4g}"
    return brief if "." in brief else f"{value:#.4g}"  # "2.000" rather than "2", because the value is not an integer


def format_duration(seconds: float) -> str:
    """Return a duration in its two largest units, as in '1 h 2 min' for 3725 and '42 s' for 42."""
    if abs(seconds) < 60:
        return f"{seconds:.3g} s"
    total = round(seconds)
    parts = [(total // 86400, "d"), (total // 3600 % 24, "h"), (total // 60 % 60, "min"), (total % 60, "s")]
    first = next(index for index, (amount, _) in enumerate(parts) if amount)  # the largest unit that is not 0
    return " ".join(f"{amount} {unit}" for amount, unit in parts[first : first + 2] if amount)
