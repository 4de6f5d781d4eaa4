"""Memory of one more layer on each rank of a layout: forecasts and plans compared with NCCL ranks of torch's CUDA build."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(1200)
def test_memory_of_one_more_layer_matches_ranks_by_hand() -> None:
    """Compare a forecast and a plan with NCCL ranks on which plain torch shards and splits the model."""
    pytest.importorskip("simulated_cuda")
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.cuda_build.layouts", "fsdp", "fsdp+tp=2", "loss parallel"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.stdout.splitlines() if "|" in line]
    slopes = {
        cells[0]: [int(cell.replace(",", "")) for cell in cells[2:]]
        for cells in rows
        if len(cells) == 5 and cells[1].isdigit()
    }
    assert list(slopes) == ["fsdp", "fsdp+tp=2", "loss parallel"]
    for layout, (real, forecast, planned) in slopes.items():
        assert forecast == pytest.approx(real, rel=0.001), layout
        assert planned == pytest.approx(real, rel=0.001), layout
