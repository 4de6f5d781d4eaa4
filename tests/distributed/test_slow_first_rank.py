"""Blocks of `main_process_first` that take longer than the run's timeout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway import Accelerator
from headway.errors import ConfigError

SCRIPT = """
import sys, time
import torch
from headway import Accelerator

accelerator = Accelerator(cpu=True)
options = {"timeout": float(sys.argv[1])} if len(sys.argv) > 1 else {}
with accelerator.main_process_first(**options):
    if accelerator.is_main_process:
        time.sleep(8)
print("rank", accelerator.process_index, "sum", float(accelerator.reduce(torch.ones(1))), flush=True)
"""


def start(folder: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    (folder / "train.py").write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWAY_", "GLOO_"))}
    environment |= {"HEADWAY_HOME": str(folder), "HEADWAY_TIMEOUT": "3", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


LAUNCHERS = [
    pytest.param(("headway", "launch", "-n", "2", "--cpu", "train.py"), id="headway launch"),
    pytest.param(("torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"), id="torchrun"),
]


@pytest.mark.slow
@pytest.mark.parametrize("command", LAUNCHERS)
@pytest.mark.parametrize("timeout", ["60", "0"])
def test_other_ranks_wait_as_long_as_given(command, timeout, tmp_path):
    done = start(tmp_path, *command, timeout)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 sum 2.0", "rank 1 sum 2.0"]


@pytest.mark.slow
@pytest.mark.parametrize("command", LAUNCHERS)
def test_run_ends_at_its_timeout_with_advice(command, tmp_path):
    done = start(tmp_path, *command)
    assert done.returncode != 0
    assert "rank 0 of 2 is missing from barrier" in done.stderr
    assert "main_process_first(timeout=SECONDS)" in done.stderr


@pytest.mark.slow
def test_block_that_exceeds_its_own_timeout_is_a_hang(tmp_path):
    done = start(tmp_path, *LAUNCHERS[0].values[0], "5")
    assert done.returncode != 0
    assert "rank 0 of 2 is missing from barrier" in done.stderr
    assert "2 s of this timeout were added" in done.stderr


@pytest.mark.parametrize("timeout", [-1, float("nan"), "60", True])
def test_invalid_timeouts_are_refused(timeout):
    with (
        pytest.raises(ConfigError, match="must be a time in seconds"),
        Accelerator(cpu=True).main_process_first(timeout),
    ):
        pytest.fail("the block ran")
