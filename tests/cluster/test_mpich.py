"""`mpirun headway launch` under MPICH, whose mpirun (Hydra) Intel MPI shares."""

import shutil
import subprocess

import pytest

from headway.core.runtime.network import find_free_port

SCRIPT = """
import sys
from headway import Accelerator
accelerator = Accelerator(cpu=True)
total = accelerator.reduce(accelerator.process_index + accelerator.gather(__import__("torch").ones(1)).sum())
print("rank", accelerator.process_index, "of", accelerator.num_processes, "total", float(total), flush=True)
"""

MPIRUN = shutil.which("mpirun.mpich")
pytestmark = [
    pytest.mark.slurm,  # only `make cluster` runs it
    pytest.mark.skipif(MPIRUN is None, reason="MPICH's mpirun is not installed (Debian: mpich)"),
]


def run_mpi(folder, *command):
    (folder / "train.py").write_text(SCRIPT)
    return subprocess.run([MPIRUN, "-n", "2", *command], cwd=folder, capture_output=True, text=True, timeout=180)


def test_tasks_form_one_group(tmp_path):
    port = str(find_free_port())
    done = run_mpi(tmp_path, "headway", "launch", "--cpu", "--main_process_port", port, "train.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[-2:] == ["rank 0 of 2 total 5.0", "rank 1 of 2 total 5.0"]


def test_without_a_port_nothing_runs_alone(tmp_path):
    done = run_mpi(tmp_path, "headway", "launch", "--cpu", "train.py")
    assert done.returncode != 0
    assert "add --main_process_port PORT" in done.stderr
    assert "of 1" not in done.stdout


def test_script_without_launcher_is_warned_of(tmp_path):
    done = run_mpi(tmp_path, "python", "train.py")
    assert done.stderr.count("mpirun has started 2 tasks of this script") == 1
