"""Ctrl-C or SIGTERM to a launch of two processes prints one line about the end and one about the last checkpoint."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headway.core.checkpoint.loading.files import verify_checkpoint
from headway.core.runtime.resume_advice import NO_CHECKPOINT, format_resume_advice

HEAD = """
import os, time, torch
from headway import Accelerator, ProjectConfiguration

def show(text):
    os.write(1, f"{text}\\n".encode())

def build(is_automatic=True, **options):
    project = ProjectConfiguration("run", automatic_checkpoint_naming=is_automatic)
    accelerator = Accelerator(cpu=True, project_config=project, **options)
    return accelerator, accelerator.prepare(torch.nn.Linear(4000, 1000))

"""
SLEEPS = "show('ready')\ntime.sleep(300)\n"
IN_SAVE = """
accelerator, model = build()
accelerator.save_state()

def wait_in_the_save(models, weights, folder):
    show("ready")
    time.sleep(300)

accelerator.register_save_state_pre_hook(wait_in_the_save)
accelerator.save_state()
"""
NOT_PREEMPTIBLE = f"accelerator, model = build(preemption=False)\naccelerator.save_state()\n{SLEEPS}"
NAMED = f"""
accelerator, model = build(is_automatic=False)
accelerator.save_state("kept")
{SLEEPS}
"""
UNSAVED = f"accelerator, model = build()\n{SLEEPS}"
IN_THE_BACKGROUND = (
    f"accelerator, model = build()\naccelerator.save_state()\naccelerator.save_state(blocking=False)\n{SLEEPS}"
)
RESTARTED = f"""
accelerator, model = build()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    accelerator.save_state()
    raise OSError("once")
{SLEEPS}
"""
NO_ACCELERATOR = SLEEPS
ACCELERATES = """
import os, sys, time, torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(4, 1))
if "save" in sys.argv:
    accelerator.save_state("kept")
os.write(1, b"ready\\n")
time.sleep(300)
"""


def stop_launch(folder: Path, body: str, *flags: str, number: signal.Signals, args: tuple[str, ...] = ()) -> list[str]:
    """Launch two processes, signal the launcher's process group, and return the lines printed after the line about the end."""
    (folder / "train.py").write_text(body)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWAY_", "OMP_", "GLOO_"))}
    # A background shell ignores SIGINT, and child processes inherit that, unlike those of a terminal.
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, "-m", "headway", "launch", "-q", "--cpu", "-n", "2", *flags, "train.py", *args],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**kept, "HEADWAY_HOME": str(folder)},
    )  # fmt: skip
    signal.signal(signal.SIGINT, former)
    shown = [process.stdout.readline() for _ in range(2)]
    assert shown == ["ready\n"] * 2, process.communicate(timeout=60)
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    lines = err.splitlines()
    end = f"headway: stopped by {number.name}; all 2 processes of this machine have ended"
    assert end in lines, err
    return lines[lines.index(end) + 1 :]


def test_ctrl_c_during_a_save_names_the_previous_checkpoint(tmp_path):
    lines_after_end = stop_launch(tmp_path, HEAD + IN_SAVE, number=signal.SIGINT)
    folder = tmp_path / "run" / "checkpoints"
    assert lines_after_end == [format_resume_advice(folder / "checkpoint_0", is_automatic=True, method="resume")]
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_0", "latest"]


@pytest.mark.slow
def test_ctrl_c_names_a_checkpoint_written_in_the_background(tmp_path):
    (lines_after_end,) = stop_launch(tmp_path, HEAD + IN_THE_BACKGROUND, number=signal.SIGINT)
    folder = tmp_path / "run" / "checkpoints"
    newest = folder / (folder / "latest").read_text().strip()
    assert lines_after_end == format_resume_advice(newest, is_automatic=True, method="resume")
    verify_checkpoint(newest)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(NAMED, 'the last checkpoint is {}/kept; accelerator.resume("{}/kept")', marks=pytest.mark.matrix),
        pytest.param(UNSAVED, NO_CHECKPOINT, marks=pytest.mark.slow),
        pytest.param(RESTARTED, "the last checkpoint is {}/run/checkpoints/checkpoint_0", marks=pytest.mark.matrix),
        pytest.param(NO_ACCELERATOR, None, marks=pytest.mark.matrix),
    ],
    ids=["named", "unsaved", "restarted", "no_accelerator"],
)
def test_ctrl_c_names_the_last_checkpoint(tmp_path, body, expected):
    flags = ["--max_restarts", "1"] if body is RESTARTED else []
    lines_after_end = stop_launch(tmp_path, HEAD + body, *flags, number=signal.SIGINT)
    assert len(lines_after_end) == (expected is not None), lines_after_end
    if expected is not None:
        assert expected.replace("{}", str(tmp_path)) in lines_after_end[0]


@pytest.mark.slow
def test_sigterm_without_preemption_names_the_checkpoint(tmp_path):
    (lines_after_end,) = stop_launch(tmp_path, HEAD + NOT_PREEMPTIBLE, number=signal.SIGTERM)
    assert f"headway: the last checkpoint is {tmp_path}/run/checkpoints/checkpoint_0" in lines_after_end


@pytest.mark.matrix
@pytest.mark.parametrize("args", [("save",), ()])
def test_advice_names_load_state_with_as_accelerate(tmp_path, args):
    lines_after_end = stop_launch(tmp_path, ACCELERATES, "--as", "accelerate", number=signal.SIGINT, args=args)
    folder = tmp_path / "kept"
    assert lines_after_end == ([format_resume_advice(folder, is_automatic=False, method="load_state")] if args else [])
    assert "load_state" in "".join(lines_after_end) or not args
