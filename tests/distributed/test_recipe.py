"""The recipe runs from raw text to samples, and kills during its stages do not change its weights."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "recipe" / "recipe.py"
STAGES = ("pretraining", "finetuning", "reinforcement")


def start_recipe(out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "headway", "launch", "--cpu", "-n", "2", "--max_restarts", "1"]
    return subprocess.Popen(
        [*command, str(SCRIPT), "--quick", "--out", str(out)], text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def wait_for_checkpoint(stage: Path, run: subprocess.Popen[str]) -> None:
    while not (stage / "checkpoints" / "latest").exists():
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.02)


def wait_for_end(run: subprocess.Popen[str]) -> str:
    output = run.communicate(timeout=200)[0]
    assert run.returncode == 0, output
    return output


def read_weights(out: Path) -> dict[str, bytes]:
    return {stage: (out / stage / "model.safetensors").read_bytes() for stage in STAGES}


@pytest.mark.matrix
@pytest.mark.slow
def test_recipe_killed_twice_ends_with_the_same_weights(tmp_path):
    output = wait_for_end(start_recipe(tmp_path / "whole"))
    assert "resumed" not in output
    assert "drift apart" not in output

    run = start_recipe(tmp_path / "killed")
    wait_for_checkpoint(tmp_path / "killed" / "pretraining", run)
    ranks = [p for p in psutil.Process(run.pid).children(recursive=True) if SCRIPT.name in " ".join(p.cmdline())]
    ranks[-1].kill()  # the launcher starts both ranks again
    wait_for_checkpoint(tmp_path / "killed" / "reinforcement", run)
    os.killpg(run.pid, signal.SIGKILL)
    assert "pretraining/checkpoints/checkpoint_" in run.communicate()[0]
    output = wait_for_end(start_recipe(tmp_path / "killed"))
    assert "reinforcement/checkpoints/checkpoint_" in output
    assert "pretraining:" not in output  # this stage was complete

    assert read_weights(tmp_path / "killed") == read_weights(tmp_path / "whole")
    page = (tmp_path / "killed" / "report.html").read_text()
    assert all(stage in page for stage in STAGES)
