"""A preempted Trainer script: the same command resumes the run, and leaves the checkpoints of other runs untouched."""

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

class PrintLosses(TrainerCallback):
    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs and state.is_world_process_zero:
            sys.stdout.write(json.dumps({"update": state.global_step, "loss": logs["loss"].hex()}) + "\\n")
            sys.stdout.flush()
            time.sleep(0.02)

class SendSignal(TrainerCallback):
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
trainer = Trainer(Net(), args, train_dataset=rows, eval_dataset=rows[:8], callbacks=[PrintLosses, SendSignal])
trainer.train()
if trainer.is_world_process_zero():
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters())).hexdigest()
    history = [[entry["step"], entry["eval_loss"].hex()] for entry in trainer.state.log_history if "eval_loss" in entry]
    sys.stdout.write(json.dumps({"weights": digest, "evaluations": history}) + "\\n")
"""


def run_script(
    folder: Path,
    num_processes: int,
    strike: int | None = None,
    number: int = signal.SIGTERM,
    *arguments: str,
    script=SCRIPT,
):
    """Run the script, and send a signal after update `strike`. Return exit code, losses by update, final output and stderr."""
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
        record = json.loads(line)
        if "weights" in record:
            end = record
            continue
        losses[record["update"]] = record["loss"]
        if record["update"] == strike:
            process.send_signal(number)
    _, err = process.communicate(timeout=120)
    return process.returncode, losses, end, err


def list_checkpoints(folder: Path) -> set[str]:
    return {path.name for path in (folder / "out" / "checkpoints").glob("checkpoint_*")}


@pytest.mark.parametrize("num_processes", [1, 2])
def test_same_command_resumes_a_preempted_run(tmp_path, num_processes):
    """A finished run is left unchanged. A run preempted twice and killed in between matches an uninterrupted one."""
    code, curve, end, err = run_script(tmp_path, num_processes)
    assert code == 0, err
    updates = len(curve)
    assert sorted(curve) == list(range(1, updates + 1))
    old_checkpoints = list_checkpoints(tmp_path)
    assert len(old_checkpoints) == 2

    code, first, _, err = run_script(tmp_path, num_processes, strike=7)
    assert code == PREEMPTED, err
    assert "run the same command again to continue from it" in err
    assert min(first) == 1  # the previous run had ended, so this one starts from the beginning
    code, _, _, _ = run_script(tmp_path, num_processes, strike=max(first) + 7, number=signal.SIGKILL)
    assert code not in (0, PREEMPTED)
    code, second, _, err = run_script(tmp_path, num_processes, strike=max(first) + 9)
    assert code == PREEMPTED, err
    assert min(second) in range(max(first) + 1, max(first) + 8)
    code, last, resumed, err = run_script(tmp_path, num_processes)
    assert code == 0, err
    assert "resumes from its newest checkpoint" in err
    assert min(last) == max(second) + 1
    assert {**first, **second, **last} == {k: v for k, v in curve.items() if k in {**first, **second, **last}}
    assert set(curve) - {*first, *second, *last} <= set(range(max(first) + 1, min(second)))
    assert resumed == end

    assert old_checkpoints < list_checkpoints(tmp_path)  # the checkpoints of the first run are kept
    assert len(list_checkpoints(tmp_path)) == 4
    assert not (tmp_path / "out" / "preempted.json").exists()


@pytest.mark.parametrize("strategy", ["epoch", "steps"])
@pytest.mark.parametrize("batch", [1, 3])
def test_interrupted_evaluation_is_repeated_once(tmp_path, strategy, batch):
    """This includes an evaluation at the end of an epoch, which the resumed run reaches again."""
    code, losses, whole, err = run_script(tmp_path / "whole", 1, None, 0, strategy)
    assert code == 0, err
    folder = tmp_path / "struck"
    folder.mkdir()
    (folder / "strike").write_text(str(batch))
    code, first, _, err = run_script(folder, 1, None, 0, strategy)
    assert code == PREEMPTED, err
    (folder / "strike").unlink()
    code, rest, end, err = run_script(folder, 1, None, 0, strategy)
    assert code == 0, err
    assert {**first, **rest} == losses
    assert end == whole
