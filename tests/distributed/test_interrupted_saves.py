"""Ctrl-C during a save leaves only checkpoints in the folder, and a background save is completed."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from headway import Accelerator, ProjectConfiguration
from headway.core.checkpoint.loading.files import verify_checkpoint
from tests.distributed.ranks import run_ranks

BACKGROUND_SAVE = """
import os, signal, sys, threading, torch
from headway import Accelerator, ProjectConfiguration
accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(sys.argv[1], automatic_checkpoint_naming=True))
accelerator.prepare(torch.nn.Linear(6000, 6000))
accelerator.save_state(blocking=False)
threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
accelerator.wait_for_save()
threading.Event().wait(60)
"""


def test_background_save_is_completed_after_ctrl_c(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", BACKGROUND_SAVE, str(tmp_path / "run")], capture_output=True, text=True
    )
    assert result.returncode == -signal.SIGINT, result.stderr
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_0", "latest"]
    verify_checkpoint(folder / "checkpoint_0")


def interrupt_save(folder):
    """Interrupt a save on rank 0 while rank 0 waits for rank 1, which is slow. Return the name of the error."""
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project, preemption=False)
    accelerator.prepare(torch.nn.Linear(3, 3))
    accelerator.save_state()

    def hook(models, weights, staging):
        if accelerator.process_index:
            time.sleep(1)
        else:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()

    accelerator.register_save_state_pre_hook(hook)
    try:
        accelerator.save_state()
    except (KeyboardInterrupt, Exception) as error:
        return type(error).__name__


def test_interrupted_save_removes_the_files_of_all_ranks(tmp_path):
    first, _ = run_ranks(interrupt_save, 2, str(tmp_path))
    assert first == "KeyboardInterrupt"
    assert sorted(path.name for path in Path(tmp_path, "checkpoints").iterdir()) == ["checkpoint_0", "latest"]
