"""Scripts that run `--as accelerate`: SIGTERM ends the process, and the script's own save is the newest checkpoint."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, os, signal, sys
from pathlib import Path
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

set_seed(3)
accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration("run", automatic_checkpoint_naming=True))
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randn(32, 2, generator=torch.Generator().manual_seed(1)))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2, shuffle=True))
begun, folders = 0, sorted(Path("run/checkpoints").glob("checkpoint_*")) if Path("run/checkpoints").exists() else []
if folders:
    begun = json.loads((folders[-1] / "mine.json").read_text())["step"] + 1  # the step to resume from
    accelerator.load_state(str(folders[-1]))
batches = accelerator.skip_first_batches(loader, begun) if begun else loader
for step, (x,) in enumerate(batches, begun):
    with accelerator.accumulate(model):
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    print(step, loss.item().hex(), flush=True)
    if step in (3, 9):
        Path(accelerator.save_state(), "mine.json").write_text(json.dumps({"step": step}))
    if step == 6 and not begun and len(sys.argv) > 1:
        os.kill(os.getpid(), signal.SIGTERM)
"""


def run_script(folder, *args, **variables):
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "headway", "launch", "--as", "accelerate", "-n", "1", "--cpu", "train.py", *args]
    result = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=os.environ | variables, timeout=120
    )
    losses = dict(line.split() for line in result.stdout.splitlines() if line[:1].isdigit())
    return result.returncode, losses, result.stderr


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux signals")
def test_script_resumes_from_its_own_save_after_sigterm(tmp_path):
    _, whole, _ = run_script(tmp_path / "whole")
    assert len(whole) == 16
    code, first, stderr = run_script(tmp_path / "cut", "once")
    assert code in (-signal.SIGTERM, 128 + signal.SIGTERM), stderr
    assert sorted(path.name for path in (tmp_path / "cut/run/checkpoints").glob("checkpoint_*")) == ["checkpoint_0"]
    code, rest, stderr = run_script(tmp_path / "cut", "once")
    assert code == 0, stderr
    assert {**first, **rest} == whole
    assert min(map(int, rest)) == 4


@pytest.mark.slow
def test_preemption_setting_saves_before_exit(tmp_path):
    code, _, stderr = run_script(tmp_path / "cut", "once", HEADWAY_PREEMPTION="1")
    assert code == 75, stderr
    assert (tmp_path / "cut/run/checkpoints/checkpoint_1").is_dir()
