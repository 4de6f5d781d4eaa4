"""Ctrl-C in a save leaves nothing beside the checkpoints, and one that is written behind the loop is written to its end."""

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

BEHIND = """
import os, signal, sys, threading, torch
from headway import Accelerator, ProjectConfiguration
accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(sys.argv[1], automatic_checkpoint_naming=True))
accelerator.prepare(torch.nn.Linear(6000, 6000))
accelerator.save_state(blocking=False)
threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
accelerator.wait_for_save()
threading.Event().wait(60)
"""


def test_a_save_behind_the_loop_is_written_to_its_end(tmp_path):
    ended = subprocess.run([sys.executable, "-c", BEHIND, str(tmp_path / "run")], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGINT, ended.stderr
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_0", "latest"]
    verify_checkpoint(folder / "checkpoint_0")


def interrupted(folder):
    """Rank 0 waits for rank 1, which is slow, when Ctrl-C comes to it."""
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


def test_the_others_files_go_with_an_interrupted_save(tmp_path):
    first, _ = run_ranks(interrupted, 2, str(tmp_path))
    assert first == "KeyboardInterrupt"
    assert sorted(path.name for path in Path(tmp_path, "checkpoints").iterdir()) == ["checkpoint_0", "latest"]
