"""Reads the memory forecast that `headway estimate --script` prints when `headway verify` runs it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.verify.records import RunRecord

_MOST_REASON = 200
"""Largest length, in characters, of the text that explains why there is no forecast."""


@dataclass(frozen=True)
class MemoryForecast:
    """Forecast of the memory of a script that runs in a single process. Sizes are in bytes.

    Attributes:
        device: Name of the device, as listed in docs/forecast.md.
        allocated: Peak memory of tensors.
        least: Lower bound of the peak memory of the whole process on the device.
        total: Likely peak memory of the whole process on the device.
        most: Upper bound of the peak memory of the whole process on the device.
        fits: Whether the script fits on the device: True if `most` fits, False if `least` does not fit, else None.
        caveats: Assumptions and known gaps of the forecast.
    """

    device: str
    allocated: int
    least: int
    total: int
    most: int
    fits: bool | None
    caveats: tuple[str, ...]


def read_forecast(record: RunRecord) -> tuple[MemoryForecast | None, str]:
    """Return the forecast that a run of `headway estimate --script` printed, and the reason if there is none.

    The result is (forecast, "") or (None, reason).
    """
    path = Path(record.request.folder, "output.txt")
    text = path.read_text("utf-8", "replace") if path.exists() else ""
    if record.code != 0:
        return None, _find_reason(text)
    try:
        # The script can print text before and after the JSON object, which begins with a line that is only "{".
        entries: dict[str, Any] = json.JSONDecoder().raw_decode(text[f"\n{text}".rindex("\n{\n") :])[0]
    except ValueError:
        return None, "the forecast printed no result"
    return (
        MemoryForecast(
            device=entries["device"],
            allocated=entries["allocated"],
            least=entries["least"],
            total=entries["total"],
            most=entries["most"],
            fits=entries["fits"],
            caveats=tuple(entries["caveats"]),
        ),
        "",
    )


def _find_reason(text: str) -> str:
    """Return the last error in the output of a forecast, or else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["it ended without a message"]
    errors = [line for line in lines if "error:" in line.lower()]
    reason = (errors or lines)[-1].removeprefix("headway: error: ")
    return reason if len(reason) <= _MOST_REASON else f"{reason[: _MOST_REASON - 3]}..."
