"""Under FSDP ranks wait in each other's gathers and reductions: a report names the unit, the line and the rank that is missing."""

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.distributed.test_hang import PATIENCE, begin, line_of

MODEL = """
import os, time, torch
from torch import nn
from headway import Accelerator
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
}  # fmt: skip


def run(folder: Path, name: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    layout, num_ranks = name.split()[0], "4" if name.startswith("hsdp") else "2"
    flags = ("--cpu", "-n", num_ranks, "-q", "--patience", str(PATIENCE), "--strategy", layout)
    process = begin(folder, CASES[name][0], *flags)
    try:
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_hang_inside_fsdp_names_unit_line_and_rank(tmp_path):
    with ThreadPoolExecutor(len(CASES)) as pool:
        ran = {name: pool.submit(run, tmp_path / re.sub(r"\W", "_", name), name) for name in CASES}
    for name, (body, missing, waiting) in CASES.items():
        result = ran[name].result()
        shown = f"{name}:\n{result.stderr}"
        gone, waits = line_of(body, "# GONE"), line_of(body, "# WAITS")
        assert result.returncode == 1, shown
        assert re.search(rf"this run hangs: rank {missing} of \d is missing from ", result.stderr), shown
        assert f"is at train.py:{gone}" in result.stderr, shown
        for ranks, operation in waiting.items():
            pattern = rf"{ranks}.* waits? in {re.escape(operation)} .*at train.py:{waits}"
            assert re.search(pattern, result.stderr), shown
