"""Test the proof of memory on records of a run: growth, the forecast and the measured peak, and the full run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headway.verify.proofs.memory import check_memory
from headway.verify.record_types import RunFacts, UpdateRecord
from headway.verify.records import RunRecord
from headway.verify.request import RunRequest
from headway.verify.verdict import RunSet

MIB = 1 << 20


def make_record(
    folder: Path, name: str, *, code: int = 0, output: str = "", growth: int = 0, **facts: object
) -> RunRecord:
    place = folder / name
    place.mkdir()
    (place / "output.txt").write_text(output)
    record = RunRecord(RunRequest(name, str(place), str(place)), 1, code, output, facts_by_rank=[RunFacts(**facts)])
    updates = {
        number: UpdateRecord(number=number, seconds=0.1, resident_bytes=100 * MIB + number * growth)
        for number in range(1, 7)
    }
    record.updates_by_rank.append(updates)
    return record


def make_output(allocated: int, device: str = "cpu", *, fits: bool | None = None) -> str:
    """Return the output of `headway estimate --script --json`, between lines that the script printed."""
    sizes = {"allocated": allocated, "least": 2 * allocated, "total": 3 * allocated, "most": 4 * allocated}
    found = {"device": device, **sizes, "fits": fits, "caveats": ["a caveat"]}
    return f"epoch 0: {{loss}}\n{json.dumps(found, indent=1)}\nprinted at exit\n"


@pytest.mark.parametrize(
    ("forecast", "measured", "status"),
    [(100, 101, "PASS"), (100, 114, "PASS"), (100, 130, "NOT CHECKED"), (130, 100, "NOT CHECKED")],
)
def test_forecast_is_compared_with_the_measured_peak(tmp_path: Path, forecast: int, measured: int, status: str) -> None:
    runs = RunSet(
        baseline=make_record(tmp_path, "baseline"),
        measured=make_record(tmp_path, "measured", tensor_peak_bytes=measured * MIB),
        forecast=make_record(tmp_path, "forecast", output=make_output(forecast * MIB)),
    )
    verdict = check_memory(runs)
    assert verdict.status == status
    assert f"forecast {forecast}.0 MiB, measured {measured}.0 MiB" in verdict.reason
    assert ("a caveat" in verdict.reason) == (status == "NOT CHECKED")


def test_small_models_may_differ_more(tmp_path: Path) -> None:
    runs = RunSet(
        baseline=make_record(tmp_path, "baseline"),
        measured=make_record(tmp_path, "measured", tensor_peak_bytes=4000),
        forecast=make_record(tmp_path, "forecast", output=make_output(2000)),
    )
    assert check_memory(runs).status == "PASS"


def test_script_that_cannot_be_forecast_is_not_checked(tmp_path: Path) -> None:
    output = "Traceback ...\nheadway: error: the operation nonzero at train.py:3 depends on values\n"
    runs = RunSet(
        baseline=make_record(tmp_path, "baseline"),
        measured=make_record(tmp_path, "measured", tensor_peak_bytes=3 * MIB),
        forecast=make_record(tmp_path, "forecast", code=2, output=output),
    )
    verdict = check_memory(runs)
    assert verdict.status == "NOT CHECKED"
    assert "tensors take 3.0 MiB" in verdict.reason
    assert "nonzero at train.py:3 depends on values" in verdict.reason


@pytest.mark.parametrize(("fits", "status"), [(True, "PASS"), (None, "PASS"), (False, "FAIL")])
def test_full_run_that_does_not_fit_fails(tmp_path: Path, fits: bool | None, status: str) -> None:
    runs = RunSet(
        baseline=make_record(tmp_path, "baseline"),
        measured=make_record(tmp_path, "measured", tensor_peak_bytes=100 * MIB),
        forecast=make_record(tmp_path, "forecast", output=make_output(100 * MIB)),
        full=make_record(tmp_path, "full", output=make_output(100 * MIB, "t4", fits=fits)),
    )
    verdict = check_memory(runs)
    assert verdict.status == status
    assert "the full run takes 300.0 MiB on t4 (200.0 MiB to 400.0 MiB)" in verdict.reason


def test_growth_fails_whatever_is_forecast(tmp_path: Path) -> None:
    runs = RunSet(baseline=make_record(tmp_path, "baseline", growth=5 * MIB))
    verdict = check_memory(runs)
    assert verdict.status == "FAIL"
    assert "memory grows by about 5.0 MiB with each update" in verdict.reason


@pytest.mark.parametrize(
    ("sizes", "num_bytes", "status"),
    [
        ((280, 295, 299, 297, 303, 311), 21, "FAIL"),  # a save frees memory after the fourth update
        ((280, 281, 279, 282, 280, 281), 21, "PASS"),  # kept tensors replace others
        ((280, 295, 299, 297, 303, 311), 3, "PASS"),  # kept, but small
    ],
    ids=["unsteady", "constant", "small"],
)
def test_kept_tensors_confirmed_by_the_memory_in_use_fail(
    tmp_path: Path, sizes: tuple[int, ...], num_bytes: int, status: str
) -> None:
    kept = [
        {
            "line": "train.py:9 in <lambda>",
            "updates": [1, 2, 3, 4, 5],
            "tensor_bytes": num_bytes * MIB,
            "graph_bytes": 0,
        }
    ]
    baseline = make_record(tmp_path, "baseline", alive_tensors=kept)
    for number, size in enumerate(sizes, 1):
        baseline.updates_by_rank[0][number] = replace(baseline.updates_by_rank[0][number], resident_bytes=size * MIB)
    runs = RunSet(
        baseline=baseline,
        measured=make_record(tmp_path, "measured", tensor_peak_bytes=100 * MIB),
        forecast=make_record(tmp_path, "forecast", output=make_output(100 * MIB)),
    )
    verdict = check_memory(runs)
    assert verdict.status == status
    assert ("tensors made at train.py:9 in <lambda> are kept" in verdict.reason) == (status == "FAIL")
