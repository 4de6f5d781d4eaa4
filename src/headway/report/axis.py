"""Round ticks for an axis, and numbers as people write them: bytes, shares, durations, rates.

script.js does the same for zoomed axes; tests hold the two to one another.
"""

import math
import sys
from itertools import count as counted
from itertools import takewhile

from headway.units import format_bytes

_DURATIONS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400)


def ticks(low: float, high: float, target: int = 5, unit: str = "number") -> list[float]:
    """Round values from `low` to `high`, about `target` of them.

    Args:
        low: the lower end of the axis.
        high: the upper end.
        target: how many there should be.
        unit: "number", "step" (whole numbers), "bytes" (powers of 2 apart), "share" or "seconds".
    """
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    step = _round_step((high - low) / target, unit)
    start = math.ceil(low / step - 1e-9)
    found = takewhile(lambda value: value <= high + step * 1e-9, ((start + index) * step for index in counted()))
    return [0.0 if abs(value) < step * 1e-9 else value for value in found]


def _round_step(rough: float, unit: str) -> float:
    factor = 1.0
    if unit == "seconds":
        fitting = [step for step in _DURATIONS if step >= rough]
        if rough > 0.5 and fitting:
            return float(fitting[0])
        factor = 86400.0 if rough > 1 else 1.0
    elif unit == "bytes" and rough >= 1:
        return float(2.0 ** math.ceil(math.log2(rough * 0.999)))
    elif unit == "step":
        rough = max(rough, 1.0)
    power = 10.0 ** math.floor(math.log10(rough / factor))
    nice = next((step for step in (1, 2, 2.5, 5, 10) if _fits(step * power * factor, rough, unit)), 10)
    return nice * power * factor


def _fits(step: float, rough: float, unit: str) -> bool:
    return step >= rough * 0.999 and (unit != "step" or step == int(step))


def tick_text(value: float, step: float, unit: str) -> str:
    """A tick's label, with as many digits as the distance between ticks asks for.

    Args:
        value: the tick.
        step: the distance to the next one.
        unit: as in `ticks`.
    """
    if unit == "bytes":
        text = format_bytes(value)
        return text.replace(".0 ", " ")
    if unit == "share":
        return f"{value * 100:.{_digits(step * 100)}f}%"
    if unit == "seconds":
        return duration(value)
    if value == 0:
        return "0"
    size = max(abs(value), step)
    if size >= 10_000:
        return short(value)
    if step < 0.0005:
        return _exponent(value)
    return f"{value:.{_digits(step)}f}"


def _digits(step: float) -> int:
    if step <= 0:
        return 3
    digits = max(0, -math.floor(math.log10(step)))
    scaled = step * 10.0**digits
    return min(8, digits + int(abs(scaled - round(scaled)) > 1e-6))


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
