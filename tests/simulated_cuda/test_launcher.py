"""The launcher on a machine where torch finds devices but the launcher does not: no NVML, nvidia-smi or device files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
from headway import Accelerator
accelerator = Accelerator()
print("computes on", accelerator.device, "of", accelerator.num_processes)
"""


def launch(tmp_path: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    pytest.importorskip("simulated_cuda")
    (tmp_path / "train.py").write_text(SCRIPT)
    # Without autoload, the entry point of the simulated device does not make the launcher ask torch. Real devices have none.
    environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "SIMULATED_CUDA_DEVICES": "2", **environment}
    return subprocess.run(
        [sys.executable, "-m", "headway", "launch", "-n", "2", "train.py"],
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_devices_that_the_launcher_did_not_find_are_refused(tmp_path: Path) -> None:
    ran = launch(tmp_path)
    assert ran.returncode != 0
    assert "computes on" not in ran.stdout
    assert "headway: 2 processes on cpu" in ran.stderr
    assert "started this process for the CPU, but torch" in ran.stderr
    assert "finds 2 of cuda here" in ran.stderr


def test_the_launcher_counts_what_torch_finds(tmp_path: Path) -> None:
    ran = launch(tmp_path, HEADWAY_DEVICE="cuda")
    assert ran.returncode == 0, ran.stderr
    assert "headway: 2 processes on cuda" in ran.stderr
    assert sorted(line for line in ran.stdout.splitlines() if "computes" in line) == [
        f"computes on cuda:{rank} of 2" for rank in range(2)
    ]
