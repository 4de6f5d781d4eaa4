"""`python -m benchmarks.gpu` here: its results are kept apart from a card's, and the record of each run of a forecast is whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_forecasts_beside_real_runs(tmp_path: Path) -> None:
    pytest.importorskip("simulated_cuda")
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "forecast", "--size", "smallest", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "SIMULATED_CUDA_VALUES": "0"},
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
    assert "without a GPU" in (tmp_path / "simulated.md").read_text()
    step = json.loads((tmp_path / "simulated.json").read_text())["steps"]["forecast"]
    assert step["machine"]["simulated"] == "without values"
    rows = {row["name"]: row for row in step["rows"]}
    cases = [name.removesuffix(": tensors") for name in rows if name.endswith(": tensors")]
    assert len(cases) == 3
    for case in cases:
        replayed = rows[f"{case}: recorded requests, replayed"]
        # Nothing is left of the case before: what was recorded is all that the allocator took.
        assert replayed["value"] == rows[f"{case}: allocator"]["value"]
        assert replayed["reference"] == replayed["value"]
        assert rows[f"{case}: tensors"]["is_met"]


@pytest.mark.timeout(900)
def test_models_beside_torchs_allocator() -> None:
    """Hand-written loops of models that no other test uses; one kind of device stands for the table's six."""
    pytest.importorskip("simulated_cuda")
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.cuda_build.allocator", "--rows", "h100", "0"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "SIMULATED_CUDA": "h100", "SIMULATED_CUDA_VALUES": "0", "SIMULATED_CUDA_MIB": "200000"},
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    rows = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[")]
    told = [(case["model"], found) for case, found in rows if "error" not in found]
    assert len(told) >= 14
    for model, found in told:
        (allocated, reserved), (wanted, _, most) = found["real"], found["forecast"]
        assert wanted == pytest.approx(allocated, rel=0.01), model
        assert most >= reserved, model
