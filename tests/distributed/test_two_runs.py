"""Two runs in one folder: the second gets an error that names the first, and the first continues undisturbed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed
from headway.errors import CheckpointError
from tests.distributed.ranks import run_ranks


def train(folder, num_updates, on_update=lambda update: None, is_resumed=False):
    """Train and save `num_updates` updates, and return their losses."""
    set_seed(5)
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    data = TensorDataset(torch.randn(64, 3, generator=torch.Generator().manual_seed(1)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2, shuffle=True))
    if is_resumed:
        accelerator.resume("latest")
    losses = []
    for _ in accelerator.epochs(2):
        for (x,) in loader:
            with accelerator.accumulate(model):
                loss = model(x).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            accelerator.save_state(blocking=accelerator.num_updates % 2 == 0)
            on_update(accelerator.num_updates)
            if accelerator.num_updates == num_updates:
                accelerator.wait_for_save()
                return losses
    return losses


def hold(folder, held, until):
    """Train, and wait after the third update: create the file `held`, and continue once `until` exists."""

    def wait(update):
        if update == 3:
            Path(held).touch()
            while not Path(until).exists():
                time.sleep(0.05)

    return train(folder, 6, wait)


def run_second(folder, is_resumed):
    try:
        return train(folder, 6, is_resumed=is_resumed)
    except CheckpointError as error:
        return str(error)


@pytest.fixture
def holder(tmp_path):
    """Start another process with a run that is in the middle of its training."""
    held, until = tmp_path / "held", tmp_path / "until"
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); from tests.distributed.test_two_runs import hold; "
        f"print(hold({str(tmp_path / 'run')!r}, {str(held)!r}, {str(until)!r}))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        while not held.exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.until = until
        yield process
        process.kill()


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.matrix), 2])
def test_second_run_is_told_which_process_uses_the_folder(num_ranks, holder, tmp_path):
    folder = str(tmp_path / "run")
    for is_resumed in (True, False):
        for error in run_ranks(run_second, num_ranks, folder, is_resumed):
            assert f"{folder}/checkpoints is in use by another run" in error
            assert f"process {holder.pid} on" in error
    holder.until.touch()
    output, _ = holder.communicate()
    assert output.strip() == str(run_ranks(train, 1, str(tmp_path / "alone"), 6)[0])
    assert sorted(path.name for path in Path(folder).iterdir()) == ["checkpoints"]


def test_killed_run_does_not_block_the_next_one(holder, tmp_path):
    folder = str(tmp_path / "run")
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    (rest,) = run_ranks(train_resumed, 1, folder)
    assert rest == run_ranks(train, 1, str(tmp_path / "alone"), 6)[0][-len(rest) :]


def train_resumed(folder):
    return train(folder, 6, is_resumed=True)
