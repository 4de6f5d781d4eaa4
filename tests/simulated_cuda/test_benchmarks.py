"""`python -m benchmarks.gpu` on the simulated device: results go to a separate file, and each forecast's record is complete."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_forecasts_are_compared_with_real_runs(tmp_path: Path) -> None:
    pytest.importorskip("simulated_cuda")
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "forecast", "--size", "smallest", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "SIMULATED_CUDA_VALUES": "0"},
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    assert "without a GPU" in (tmp_path / "simulated.md").read_text()
    step = json.loads((tmp_path / "simulated.json").read_text())["steps"]["forecast"]
    assert step["machine"]["simulated"] == "without values"
    rows = {row["name"]: row for row in step["rows"]}
    cases = [name.removesuffix(": tensors") for name in rows if name.endswith(": tensors")]
    assert len(cases) == 3
    for case in cases:
        replayed = rows[f"{case}: recorded requests, replayed"]
        # If memory of an earlier case remained, the allocator's size would exceed the replayed requests.
        assert replayed["value"] == rows[f"{case}: allocator"]["value"]
        assert replayed["reference"] == replayed["value"]
        assert rows[f"{case}: tensors"]["is_met"]


@pytest.mark.timeout(900)
def test_forecasts_match_torchs_allocator() -> None:
    """Compare forecasts with hand-written loops for models that no other test uses.

    This test checks one kind of device; the published table has six.
    """
    pytest.importorskip("simulated_cuda")
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.cuda_build.allocator", "--rows", "h100", "0"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "SIMULATED_CUDA": "h100", "SIMULATED_CUDA_VALUES": "0", "SIMULATED_CUDA_MIB": "200000"},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]
    measured = [(case["model"], found) for case, found in rows if "error" not in found]
    assert len(measured) >= 14
    for model, found in measured:
        (allocated, reserved), (expected, _, most) = found["real"], found["forecast"]
        assert expected == pytest.approx(allocated, rel=0.01), model
        assert most >= reserved, model
