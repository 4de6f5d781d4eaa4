"""Numbers as people write them: bytes, shares, durations, rates; script.js writes them alike."""

import sys

from headway.common.units import format_bytes


def _exponent(value: float) -> str:
    mantissa, _, power = f"{value:.2e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}e{int(power)}"


def short(value: float) -> str:
    """A large number in few characters: 12500 -> '12.5k'."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:  # what would be rounded to a thousand of the smaller one, too
            scaled = value / size
            return f"{scaled:.3g}{letter}" if abs(scaled) < 999 else _exponent(value)
    return f"{value:.4g}"


def text(value: float | None, unit: str = "number") -> str:
    """A value for reading: four significant digits, with its unit.

    Args:
        value: any float; None gives a dash.
        unit: "number", "bytes", "share", "seconds" or "rate" (a number that is shortened).
    """
    if value is None:
        return "-"
    if value != value:
        return "nan"
    if abs(value) > sys.float_info.max:  # also integers that no float can hold
        return "inf" if value > 0 else "-inf"
    if unit == "bytes":
        return format_bytes(value)
    if unit == "share":
        return f"{value * 100:.3g}%"
    if unit == "seconds":
        return duration(value)
    if unit == "rate" and abs(value) >= 10_000:
        return short(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e9:
        return _exponent(value)
    if value == int(value):
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.2f}"
    brief = f"{value:.4g}"
    return brief if "." in brief else f"{value:#.4g}"  # 2.000, not the whole number that it is not


def duration(seconds: float) -> str:
    """A duration in its two largest units: 3725 -> '1 h 2 min', 42 -> '42 s'."""
    if abs(seconds) < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    first = next(index for index, (amount, _) in enumerate(parts) if amount)
    return " ".join(f"{amount} {unit}" for amount, unit in parts[first : first + 2] if amount)
