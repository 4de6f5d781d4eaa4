"""Test that a signal to all processes of a job does not end a worker that is just starting, before its rank has saved."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = '''
import json, multiprocessing, os, signal, sys, threading, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, Dataset
from headway import Accelerator, Preemption

folder = Path(sys.argv[2])


class Rows(Dataset):
    """Data set that reports when it is unpickled, in a worker whose worker_init_fn has not run yet."""

    def __init__(self):
        self.length = 8

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((2,), float(index))

    def __setstate__(self, state):
        announce_start()
        self.__dict__.update(state)


def announce_start():
    """Report the start of a worker, and wait until the signals have been sent."""
    (folder / "started").touch()
    while not (folder / "sent").exists():
        time.sleep(0.01)


def signal_all_processes():
    """Send SIGUSR1 to this process and its workers, as SLURM does, once a worker has started."""
    while not (folder / "started").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGUSR1)
    while not (workers := multiprocessing.active_children()):
        time.sleep(0.01)
    for worker in workers:
        os.kill(worker.pid, signal.SIGUSR1)
    (folder / "sent").touch()


if __name__ == "__main__":
    accelerator = Accelerator(cpu=True, preemption=Preemption(exits=False))
    loader = DataLoader(Rows(), batch_size=2, num_workers=1, multiprocessing_context=sys.argv[1])
    model = torch.nn.Linear(2, 1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    if sys.argv[1] == "fork":
        os.register_at_fork(after_in_child=announce_start)
    threading.Thread(target=signal_all_processes, daemon=True).start()
    num_batches, preempted = 0, False
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
        num_batches += 1
        preempted = preempted or accelerator.preempted
    blocked = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    sys.stdout.write(json.dumps({"num_batches": num_batches, "preempted": preempted, "blocked": blocked}))
'''


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_that_is_starting_survives_a_signal_to_all_processes(tmp_path: Path, method: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    finished = subprocess.run(
        [sys.executable, script, method, tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HEADWAY_LOG_LEVEL": "warning"},
    )
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout) == {"num_batches": 4, "preempted": True, "blocked": []}
