"""`breakpoint()` on one rank of a launched run reads from the terminal while the other ranks wait."""

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
def test_breakpoint_on_one_rank_reads_typed_commands(tmp_path):
    for rank in (0, 1):
        script = tmp_path / f"train{rank}.py"
        script.write_text(SCRIPT.format(rank=rank))
        command = [sys.executable, "-m", "headway", "launch", "--cpu", "-n", "2", str(script)]
        result = subprocess.run(
            command, input="p 'here', mine\nmine += 10\nc\n", capture_output=True, text=True, timeout=120, check=False
        )
        assert result.returncode == 0, result.stderr
        assert f"('here', tensor([{rank + 1}.]))" in result.stdout
        assert result.stdout.count("sum 13.0") == 2
