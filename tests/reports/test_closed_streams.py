"""Tests of `headway launch` with closed standard streams, as under cron and service managers."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
from pathlib import Path
from headway import Accelerator

accelerator = Accelerator(cpu=True)
accelerator.print("printed")
accelerator.wait_for_everyone()
Path(sys.argv[1], f"rank{accelerator.process_index}").touch()
accelerator.end_training()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("redirections", "num_processes"),
    [(">&-", 2), ("<&- >&- 2>&-", 1), pytest.param("2>&-", 2, marks=pytest.mark.matrix)],
)
def test_launch_with_closed_streams_succeeds(redirections, num_processes, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "headway", "launch", "--cpu", "-n", str(num_processes), "train.py", str(tmp_path)]
    line = " ".join(f"'{word}'" for word in command)
    result = subprocess.run(["sh", "-c", f"{line} {redirections}"], cwd=tmp_path, env=os.environ, timeout=120)
    assert result.returncode == 0
    assert len(list(tmp_path.glob("rank*"))) == num_processes
