"""Exit of a process: if a gloo thread outlived the process group, the process would abort during Python's shutdown."""

import pytest

from tests.distributed.test_launch import launch

SCRIPT = """
import atexit, os

def engine_threads():
    names = [open(f"/proc/self/task/{thread}/comm").read() for thread in os.listdir("/proc/self/task")]
    return sum("gloo" in name for name in names)

@atexit.register  # registered before Headway's function, so called after it
def report():
    print("engine threads:", during, engine_threads())

import torch
from headway import Accelerator

def train():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.backward(model(torch.ones(2, 4)).mean(), weight=2)
    optimizer.step()
    return KEPT

kept = train()
during = engine_threads()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["model", "accelerator"])
def test_no_gloo_thread_outlives_the_group(tmp_path, kept):
    result = launch(tmp_path, SCRIPT.replace("KEPT", kept), "-n", "2", "--cpu")
    assert result.returncode == 0, result.stderr
    lines = [line.split()[2:] for line in result.stdout.splitlines() if line.startswith("engine threads")]
    assert len(lines) == 2
    for during, after in lines:
        assert int(during) > 0
        assert int(after) == 0
