"""Ctrl-C in a run of one process prints the interrupted line and how to continue, instead of a traceback."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headway.core.runtime.resume_advice import format_resume_advice

SCRIPT = """
import os, signal, time, torch
from headway import Accelerator, ProjectConfiguration

accelerator = Accelerator(
    cpu=True, project_config=ProjectConfiguration(project_dir="run", automatic_checkpoint_naming=True)
)
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(2, 4)).sum())
optimizer.step()
accelerator.save_state()
os.kill(os.getpid(), signal.SIGINT)
time.sleep(5)  # the line that is interrupted
"""


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
@pytest.mark.parametrize("level", ["", "debug"])
def test_ctrl_c_prints_the_line_and_how_to_continue(tmp_path, level, monkeypatch):
    monkeypatch.setenv("HEADWAY_LOG_LEVEL", level)
    (tmp_path / "train.py").write_text(SCRIPT)
    result = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == -signal.SIGINT, result.stderr
    lines = [line for line in result.stderr.splitlines() if not line.startswith(("INFO", "DEBUG"))]
    folder = tmp_path / "run" / "checkpoints" / "checkpoint_0"
    assert lines[-1].startswith(f'headway: the last checkpoint is {folder}; accelerator.resume("latest")')
    if level:
        assert "KeyboardInterrupt" in lines
    else:
        assert len(lines) == 2
        assert lines[0].startswith("headway: stopped by Ctrl-C at train.py:1")


def test_advice_names_the_users_folder():
    text = format_resume_advice(Path("runs/a"), is_automatic=False, method="resume")
    assert 'runs/a; accelerator.resume("runs/a")' in text


def test_advice_without_a_checkpoint_says_how_to_save(tmp_path):
    script = "import os, signal\nfrom headway import Accelerator\nkept = Accelerator(cpu=True)\nos.kill(os.getpid(), signal.SIGINT)\n"
    result = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.stderr.splitlines()[-1].startswith("headway: no checkpoint was saved.")
    assert "save_state()" in result.stderr
