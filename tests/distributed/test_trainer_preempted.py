"""A Trainer's script that is asked to end: the same command goes on from there, and touches no other run's checkpoints."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headway.errors import PREEMPTED

SCRIPT = """
import hashlib, json, os, pathlib, signal, sys, time, torch
from headway import Trainer, TrainerCallback, TrainingArguments

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))

    def forward(self, x, labels):
        logits = self.body(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

class Tell(TrainerCallback):
    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs and state.is_world_process_zero:
            sys.stdout.write(json.dumps({"update": state.global_step, "loss": logs["loss"].hex()}) + "\\n")
            sys.stdout.flush()
            time.sleep(0.02)

class Strike(TrainerCallback):
    num_left = int(pathlib.Path("strike").read_text()) if pathlib.Path("strike").exists() else 0

    def on_prediction_step(self, args, state, control, **kwargs):
        self.num_left -= 1
        if self.num_left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)

points = torch.randn(36, 4, generator=torch.Generator().manual_seed(2))
rows = [{"x": row, "labels": int(row.sum() > 0)} for row in points]
args = TrainingArguments("out", per_device_train_batch_size=3, num_train_epochs=4, save_steps=5, save_total_limit=2, logging_steps=1,
                         eval_strategy=(sys.argv[1:] or ["steps"])[0], eval_steps=11, learning_rate=0.01, use_cpu=True,
                         disable_tqdm=True)
trainer = Trainer(Net(), args, train_dataset=rows, eval_dataset=rows[:8], callbacks=[Tell, Strike])
trainer.train()
if trainer.is_world_process_zero():
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters())).hexdigest()
    history = [[entry["step"], entry["eval_loss"].hex()] for entry in trainer.state.log_history if "eval_loss" in entry]
    sys.stdout.write(json.dumps({"weights": digest, "evaluations": history}) + "\\n")
"""


def run(
    folder: Path,
    num_processes: int,
    strike: int | None = None,
    number: int = signal.SIGTERM,
    *arguments: str,
    script=SCRIPT,
):
    """The command; struck after that update. Returns the exit code, losses by update, what is told at the end, and errors."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWAY_", "OMP_", "GLOO_"))}
    command = [sys.executable, "train.py", *arguments]
    if num_processes > 1:
        command = [sys.executable, "-m", "headway", "launch", "--cpu", "-n", str(num_processes), "train.py", *arguments]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**kept, "HEADWAY_HOME": str(folder)})  # fmt: skip
    losses, end = {}, {}
    assert process.stdout is not None
    for line in process.stdout:
        if not line.startswith("{"):
            continue
        told = json.loads(line)
        if "weights" in told:
            end = told
            continue
        losses[told["update"]] = told["loss"]
        if told["update"] == strike:
            process.send_signal(number)
    _, err = process.communicate(timeout=120)
    return process.returncode, losses, end, err


def checkpoints(folder: Path) -> set[str]:
    return {path.name for path in (folder / "out" / "checkpoints").glob("checkpoint_*")}


@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_same_command_goes_on(tmp_path, num_processes):
    """A run that ended well stays as it is; one that is preempted twice, and killed in between, is the undisturbed one."""
    code, curve, end, err = run(tmp_path, num_processes)
    assert code == 0, err
    updates = len(curve)
    assert sorted(curve) == list(range(1, updates + 1))
    elder = checkpoints(tmp_path)
    assert len(elder) == 2

    code, first, _, err = run(tmp_path, num_processes, strike=7)
    assert code == PREEMPTED, err
    assert "start the same command again, and it goes on from there" in err
    assert min(first) == 1  # the run before had ended
    code, _, _, _ = run(tmp_path, num_processes, strike=max(first) + 7, number=signal.SIGKILL)
    assert code not in (0, PREEMPTED)
    code, second, _, err = run(tmp_path, num_processes, strike=max(first) + 9)
    assert code == PREEMPTED, err
    assert min(second) in range(max(first) + 1, max(first) + 8)
    code, last, resumed, err = run(tmp_path, num_processes)
    assert code == 0, err
    assert "resumes from its newest checkpoint" in err
    assert min(last) == max(second) + 1
    assert {**first, **second, **last} == {k: v for k, v in curve.items() if k in {**first, **second, **last}}
    assert set(curve) - {*first, *second, *last} <= set(range(max(first) + 1, min(second)))
    assert resumed == end

    assert elder < checkpoints(tmp_path)  # theirs were rotated by nobody
    assert len(checkpoints(tmp_path)) == 4
    assert not (tmp_path / "out" / "preempted.json").exists()


@pytest.mark.parametrize("strategy", ["epoch", "steps"])
@pytest.mark.parametrize("batch", [1, 3])
def test_an_evaluation_that_is_broken_off_is_made_once_more_and_not_twice(tmp_path, strategy, batch):
    """Also where it was that of an epoch's end, which the resumed run comes to again."""
    code, losses, whole, err = run(tmp_path / "whole", 1, None, 0, strategy)
    assert code == 0, err
    folder = tmp_path / "struck"
    folder.mkdir()
    (folder / "strike").write_text(str(batch))
    code, first, _, err = run(folder, 1, None, 0, strategy)
    assert code == PREEMPTED, err
    (folder / "strike").unlink()
    code, rest, end, err = run(folder, 1, None, 0, strategy)
    assert code == 0, err
    assert {**first, **rest} == losses
    assert end == whole
