"""Ranks that wait in FSDP's collectives or for a pipeline stage: the report names the operation, the line and the missing rank."""

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.distributed.test_hang import TIMEOUT, find_line
from tests.distributed.test_launch import start_launch

MODEL = """
import os, time, torch
from torch import nn
from headway import Accelerator, PipelineOptions
accelerator = Accelerator(cpu=True)
rank = accelerator.process_index
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 4), nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x
model = accelerator.prepare(Net())
"""

EXPERTS = """
import time, torch
from torch import nn
from headway import Accelerator
accelerator = Accelerator(cpu=True)
rank = accelerator.process_index
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts, self.weight = 2, nn.Parameter(torch.ones(2, 4, 4))
    def forward(self, x, index, weights):
        return torch.einsum("tkio,ti->tko", self.weight[index], x).mul(weights[..., None]).sum(1)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.experts = nn.Linear(4, 4), Experts()
    def forward(self, x):
        return self.experts(self.first(x), torch.tensor([[0], [1]]), torch.ones(2, 1))  # WAITS
model = accelerator.prepare(Net())
"""

CASES = {
    "fsdp before": (MODEL + """
for step in range(3):
    if step == 2 and rank == 1:
        time.sleep(300)  # GONE
    model(torch.ones(2, 4)).sum().backward()  # WAITS
""", 1, {"rank 0": "all-gather of the root"}),
    "fsdp backward": (MODEL + """
def lag(*gradients):
    if rank == 1:
        time.sleep(300)  # GONE
model.blocks[1].register_full_backward_hook(lag)
model(torch.ones(2, 4)).sum().backward()  # WAITS
""", 1, {"rank 0": "reduce-scatter of blocks.1"}),
    "hsdp=2 before": (MODEL + """
for step in range(2):
    if step == 1 and rank == 3:
        time.sleep(300)  # GONE
    model(torch.ones(2, 4)).sum().backward()  # WAITS
""", 3, {"ranks 0-1": "all-reduce of blocks.2", "rank 2": "all-gather of the root"}),
    "ep experts": (EXPERTS + """
def lag(*given):
    if rank == 1:
        time.sleep(300)  # GONE
model.experts.register_forward_pre_hook(lag, prepend=True)
model(torch.ones(2, 4)).sum().backward()
""", 1, {"rank 0": "all-to-all of experts"}),
    "pp stopped": (MODEL + """
import signal
def halt(*given):
    if rank == 1 and step == 2:
        for _ in range(25):
            time.sleep(0.1)  # GONE
        os.kill(os.getpid(), signal.SIGSTOP)
model.blocks[1].register_forward_pre_hook(halt)
for step in range(3):
    accelerator.backward(model(torch.ones(6, 4)).sum())  # WAITS
""", 1, {"rank 0": "send to stage 1", "rank 2": "receive from stage 1"}),
    "pp backward": (MODEL.replace("cpu=True", "cpu=True, kwargs_handlers=[PipelineOptions('1f1b')]") + """
def lag(*gradients):
    if rank == 1 and step == 1:
        time.sleep(300)  # GONE
model.blocks[1].register_full_backward_hook(lag)
for step in range(2):
    accelerator.forward_backward(torch.ones(6, 4), lambda part: model(part).sum())  # WAITS
""", 1, {"ranks 0, 2": "send to stage 1"}),
}  # fmt: skip


def run_case(folder: Path, name: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    layout, num_ranks = name.split()[0], {"hsdp=2": "4", "pp": "3"}.get(name.split()[0], "2")
    flags = ("--cpu", "-n", num_ranks, "-q", "--timeout", str(TIMEOUT), "--strategy", layout)
    process = start_launch(folder, CASES[name][0], *flags)
    try:
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


QUICK = ("fsdp before", "ep experts", "pp stopped")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK, id="few"),
        pytest.param([name for name in CASES if name not in QUICK], id="the others", marks=pytest.mark.matrix),
    ],
)
def test_hang_report_names_unit_line_and_rank(names, tmp_path):
    with ThreadPoolExecutor(len(names)) as pool:
        futures = {name: pool.submit(run_case, tmp_path / re.sub(r"\W", "_", name), name) for name in names}
    for name in names:
        body, missing, waiting = CASES[name]
        result = futures[name].result()
        shown = f"{name}:\n{result.stderr}"
        gone, waits = find_line(body, "# GONE"), find_line(body, "# WAITS")
        assert result.returncode == 1, shown
        assert re.search(rf"this run hangs: rank {missing} of \d is missing from ", result.stderr), shown
        assert re.search(rf"(is|was) at train.py:{gone}\b", result.stderr), shown
        for ranks, operation in waiting.items():
            pattern = rf"{ranks}.* waits? in {re.escape(operation)} .*at train.py:{waits}"
            assert re.search(pattern, result.stderr), shown
