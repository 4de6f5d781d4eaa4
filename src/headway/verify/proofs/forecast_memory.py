"""Proof that the forecast of the tensors' peak memory is right, and that the full run fits on its device."""

from headway.common.text import format_bytes
from headway.verify.forecasts import read_forecast
from headway.verify.verdict import Proof, RunSet, Verdict, describe_failure

MEMORY_PROOF = Proof("memory", title="memory", page="memory.md")
_MOST_ERROR = 0.15
"""Largest relative difference between the forecast and the measured peak of tensors."""
_LEAST_ERROR = 1 << 20
"""Difference between the forecast and the measured peak of tensors that is always allowed, in bytes."""
_NOTHING_IS_COMPILED = "assumes that nothing is compiled"
"""Text in the caveats of a forecast whose script uses `torch.compile`."""


def compare_with_forecast(runs: RunSet) -> Verdict:
    """Return the verdict on memory: whether the forecast matches the measured peak, and whether the full run fits.

    The verdict is FAIL only if the full run does not fit on its device. If the forecast is far from the measured peak,
    it is NOT CHECKED.
    """
    full_run, fits = _describe_full_run(runs)
    if fits is False:
        return MEMORY_PROOF.report_failure(
            full_run.removeprefix("; "),
            advice="use a smaller batch with gradient_accumulation_steps, activation checkpointing, or several devices "
            "with --strategy fsdp",
        )
    measured = runs.measured.rank0_facts.tensor_peak_bytes if runs.measured is not None else None
    if not measured:
        error = "" if runs.measured is None or runs.measured.code == 0 else f": {describe_failure(runs.measured)}"
        return _make_unchecked(f"the peak of tensors could not be measured{error}{full_run}")
    if runs.forecast is None:
        return _make_unchecked(f"tensors take {format_bytes(measured)}; only scripts can be forecast{full_run}")
    forecast, reason = read_forecast(runs.forecast)
    if forecast is None:
        return _make_unchecked(f"tensors take {format_bytes(measured)}; no forecast: {reason}{full_run}")
    sizes = f"forecast {format_bytes(forecast.allocated)}, measured {format_bytes(measured)}"
    text = f"tensors: {sizes} on one process{full_run}"
    if abs(forecast.allocated - measured) > max(_MOST_ERROR * measured, _LEAST_ERROR):
        caveat = f" ({forecast.caveats[0]})" if forecast.caveats else ""
        return _make_unchecked(f"{text}; the forecast is far off{caveat}")
    return MEMORY_PROOF.report_pass(text, page="forecast.md")


def _make_unchecked(reason: str) -> Verdict:
    """Return the verdict NOT CHECKED with a reason."""
    return MEMORY_PROOF.report_unchecked(reason, page="forecast.md")


def _describe_full_run(runs: RunSet) -> tuple[str, bool | None]:
    """Return a phrase about the memory of the full run on its device, and whether the run fits (None if unknown).

    The phrase is "" if no forecast of the full run was requested.
    """
    if runs.full is None:
        return "", None
    forecast, reason = read_forecast(runs.full)
    if forecast is None:
        return f"; full run: no forecast: {reason}", None
    fits = forecast.fits
    if fits is False and any(_NOTHING_IS_COMPILED in caveat for caveat in forecast.caveats):
        fits = None  # the full run compiles, and compiled code usually needs less memory
    answer = {True: "fits", False: "does not fit", None: "may fit"}[fits]
    least, total, most = map(format_bytes, (forecast.least, forecast.total, forecast.most))
    return f"; the full run takes {total} on {forecast.device} ({least} to {most}): it {answer}", fits
