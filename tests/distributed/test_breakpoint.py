"""breakpoint() on one rank of a launched run: it reads the terminal's lines, and the other ranks wait for it."""

import subprocess
import sys

import pytest

SCRIPT = """
import torch
from headway import Accelerator
accelerator = Accelerator(cpu=True)
mine = torch.tensor([accelerator.process_index + 1.0])
if accelerator.process_index == {rank}:
    breakpoint()
print("sum", accelerator.reduce(mine, "sum").item(), flush=True)
"""


@pytest.mark.slow
def test_a_breakpoint_on_one_rank_takes_what_is_typed(tmp_path):
    for rank in (0, 1):
        script = tmp_path / f"train{rank}.py"
        script.write_text(SCRIPT.format(rank=rank))
        command = [sys.executable, "-m", "headway", "launch", "--cpu", "-n", "2", str(script)]
        ran = subprocess.run(
            command, input="p 'here', mine\nmine += 10\nc\n", capture_output=True, text=True, timeout=120, check=False
        )
        assert ran.returncode == 0, ran.stderr
        assert f"('here', tensor([{rank + 1}.]))" in ran.stdout
        assert ran.stdout.count("sum 13.0") == 2
