"""Proof that the forecast of the tensors' peak memory is right, and that the full run fits on its device."""

from headway.common.text import format_bytes
from headway.verify.forecasts import read_forecast
from headway.verify.verdict import RunSet, Verdict, describe_failure

_MOST_ERROR = 0.15
"""Largest relative difference between the forecast and the measured peak of tensors."""
_LEAST_ERROR = 1 << 20
"""Difference between the forecast and the measured peak of tensors that is always allowed, in bytes."""


def compare_with_forecast(runs: RunSet) -> Verdict:
    """Return the verdict on memory: whether the forecast matches the measured peak, and whether the full run fits."""
    needed, fits = _describe_full_run(runs)
    if fits is False:
        return Verdict(
            "memory", "memory", "FAIL", needed.removeprefix("; "), (),
            "use a smaller batch with gradient_accumulation_steps, activation checkpointing, or several devices with --strategy fsdp",
            "memory.md",
        )  # fmt: skip
    measured = runs.measured.rank0_facts.get("tensor_peak_bytes") if runs.measured is not None else None
    if not measured:
        why = "" if runs.measured is None or runs.measured.code == 0 else f": {describe_failure(runs.measured)}"
        return _leave_open(f"the peak of tensors could not be measured{why}{needed}")
    if runs.forecast is None:
        return _leave_open(f"tensors take {format_bytes(measured)}; only scripts can be forecast{needed}")
    found, why = read_forecast(runs.forecast)
    if found is None:
        return _leave_open(f"tensors take {format_bytes(measured)}; no forecast: {why}{needed}")
    text = (
        f"tensors: forecast {format_bytes(found.allocated)}, measured {format_bytes(measured)} on one process{needed}"
    )
    if abs(found.allocated - measured) > max(_MOST_ERROR * measured, _LEAST_ERROR):
        caveat = f" ({found.caveats[0]})" if found.caveats else ""
        return _leave_open(f"{text}; the forecast is far off{caveat}")
    return Verdict("memory", "memory", "PASS", text, (), "", "forecast.md")


def _leave_open(reason: str) -> Verdict:
    return Verdict("memory", "memory", "NOT CHECKED", reason, (), "", "forecast.md")


def _describe_full_run(runs: RunSet) -> tuple[str, bool | None]:
    """Return a phrase about the memory of the full run on its device, and whether the run fits (None if unknown).

    The phrase is "" if no forecast of the full run was requested.
    """
    if runs.full is None:
        return "", None
    found, why = read_forecast(runs.full)
    if found is None:
        return f"; full run: no forecast: {why}", None
    answer = {True: "fits", False: "does not fit", None: "may fit"}[found.fits]
    least, total, most = map(format_bytes, (found.least, found.total, found.most))
    return f"; the full run takes {total} on {found.device} ({least} to {most}): it {answer}", found.fits
