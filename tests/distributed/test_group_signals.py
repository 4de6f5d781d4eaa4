"""A signal to every process of a job at once, including DataLoader workers, as SLURM and systemd send it."""

import json
import signal
import time

import psutil
import pytest

from headway.errors import PREEMPTED
from tests.distributed.test_launch import start_launch

BODY = """
import json, sys, time
import torch
from torch.utils.data import DataLoader, Dataset
from headway import Accelerator, ProjectConfiguration, set_seed

class Slow(Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.randn(4)

set_seed(3)
project = ProjectConfiguration(sys.argv[1], automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, project_config=project)
model = torch.nn.Linear(4, 1)
loader = DataLoader(Slow(), batch_size=5, num_workers=2, shuffle=True, multiprocessing_context="fork")
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
accelerator.resume("latest")
losses = []
for epoch in accelerator.epochs(2):
    for batch in loader:
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps({"rank": accelerator.process_index, "update": accelerator.num_updates, "loss": loss.item()}), flush=True)
"""


def read_losses(text):
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {(each["rank"], each["update"]): each["loss"] for each in found}


def launch_and_signal(folder, num_ranks, name, number=None):
    """Launch a run and send a signal to all its processes once training has begun. Return exit code, losses and stderr."""
    process = start_launch(folder, BODY, "-n", str(num_ranks), "--cpu", args=(str(folder / name),))
    early = ""
    if number is not None:
        while '"update": 2' not in early:  # of at least 16 updates per epoch, and the workers live almost until its end
            line = process.stdout.readline()
            assert line, process.stderr.read()
            early += line
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        assert len(family) >= 2 * num_ranks + 1
        for each in family:
            each.send_signal(number)
    # communicate() would lose what readline() has buffered
    out, err = process.stdout.read(), process.stderr.read()
    return process.wait(120), read_losses(early + out), err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_workers_leave_signal_handling_to_their_rank(num_ranks, number, tmp_path):
    code, whole, err = launch_and_signal(tmp_path, num_ranks, "whole")
    assert code == 0, err
    code, first, err = launch_and_signal(tmp_path, num_ranks, "cut", number)
    assert code == PREEMPTED, err
    assert "DataLoader worker" not in err
    code, rest, err = launch_and_signal(tmp_path, num_ranks, "cut")
    assert code == 0, err
    assert {**first, **rest} == whole
    assert len(first) + len(rest) == len(whole)


STUCK = """
import time
import torch
from torch.utils.data import DataLoader, Dataset
from headway import Accelerator, Preemption

class Stuck(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index > 4:
            time.sleep(1000)
        return torch.zeros(1)

accelerator = Accelerator(cpu=True, preemption=Preemption(exits=False))
loader = accelerator.prepare(DataLoader(Stuck(), batch_size=1, num_workers=2, multiprocessing_context="fork"))
batches = iter(loader)  # keep the iterator until the process ends
print(len(next(batches)))
"""


def test_stuck_workers_are_ended_with_the_process(tmp_path):
    begun = time.monotonic()
    process = start_launch(tmp_path, STUCK, "--cpu")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "1\n"), err
    assert "killed by signal" not in err
    assert time.monotonic() - begun < 100  # the process does not wait until the worker wakes up
