"""Tests of scripts that cannot be verified: the message says why, where, and what to do."""

import re
from pathlib import Path

import pytest

from headway.verify.runs import VerifyError
from tests.verify.sessions import Verifier

LOOP = """import time, torch
from torch.utils.data import DataLoader, TensorDataset
import headway
headway.set_seed(0)
accelerator = headway.Accelerator()
model = torch.nn.Linear(4, 1)
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
for number, (rows,) in enumerate(loader):
    {inside}
    accelerator.backward(model(rows).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""
HANG = "if number == 2 and accelerator.process_index == {rank}: time.sleep(600)"


def write_script(folder: Path, text: str) -> Path:
    """Write the text to `train.py` in the folder and return its path."""
    path = folder / "train.py"
    path.write_text(text)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "time_limit", "pattern"),
    [
        (LOOP.format(inside="1 / (number - 1)"), 120, "(?s)ZeroDivisionError: division by zero.*train.py.*line 10"),
        (LOOP.format(inside=HANG.format(rank=0)), 20, r"(?s)made 2 of 6 updates.*it was at train.py:10 in <module>"),
        (
            "import time\ntime.sleep(600)",
            6,
            r"(?s)created no Accelerator.*it was at train.py:2 in <module>.*--time_limit",
        ),
        (LOOP.format(inside="continue"), 120, "without an update.*counts optimizer.step"),
        ("import torch\nmodel = torch.nn.Linear(1, 1)", 120, "without creating an Accelerator.*--as accelerate"),
    ],
    ids=["crash", "hang", "hang_before_the_accelerator", "no_update", "no_loop_of_ours"],
)
def test_error_says_what_to_do(verifier: Verifier, tmp_path: Path, text: str, time_limit: int, pattern: str) -> None:
    script = write_script(tmp_path, text)
    with pytest.raises(VerifyError) as exc_info:
        verifier.verify(script, only="learning", time_limit=time_limit)
    assert re.search(pattern, str(exc_info.value)), str(exc_info.value)


@pytest.mark.slow
def test_hang_on_two_processes_names_the_rank_and_its_line(verifier: Verifier, tmp_path: Path) -> None:
    verdicts = verifier.verify(
        write_script(tmp_path, LOOP.format(inside=HANG.format(rank=1))), only="processes", time_limit=20
    )
    verdict = verdicts["processes"]
    assert verdict.status == "FAIL"
    assert "the script hangs on 2 processes" in verdict.reason
    assert re.search(r"waited for rank 1: rank 0 at train.py:\d+ in <module>, rank 1 at train.py:10", verdict.reason)


@pytest.mark.slow
def test_more_processes_than_devices_run_on_the_cpu(verifier: Verifier, tmp_path: Path) -> None:
    verdicts = verifier.verify(write_script(tmp_path, LOOP.format(inside="pass")), flags="-n 4", only="processes")
    assert verdicts["processes"].status == "PASS", verdicts
    assert "on 4 processes" in verdicts["processes"].title
