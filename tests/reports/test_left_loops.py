"""Tests of ranks that leave the training loop early: the report names them soon, whatever they wait for afterwards."""

import re
from pathlib import Path

import pytest

from headway.common.callsite import Frame
from headway.launch.watch import judge, report
from headway.launch.watch.views import CollectiveCall, RankView
from tests.distributed.test_launch import start_launch

AFTER = {
    "wait_for_everyone": "accelerator.wait_for_everyone()",
    "evaluation": "accelerator.gather(torch.ones(1))",
}

IN_MAIN = """
for step in range(9):  # LOOP
    if step == 3 and rank == 1:
        break
    update()  # WAITS
after()  # GONE
"""
IN_EPOCHS = """
for epoch in range(3):
    for step in range(9):  # LOOP
        if step == 3 and rank == 1:
            break
        update()  # WAITS
    after()  # GONE
"""
IN_FUNCTION = """
def train():
    for step in range(9):  # LOOP
        if step == 3 and rank == 1:
            return
        update()  # WAITS

train()  # CALLS
after()  # GONE
"""
RIGHT_ORDER = """
for epoch in range(3):
    before()  # GONE
    for step in range(9):
        update()  # WAITS
"""


def find_line_number(source: str, mark: str) -> int:
    """Return the number of the line that ends with the mark, or 0."""
    return next((number for number, line in enumerate(source.splitlines(), 1) if line.endswith(mark)), 0)


def make_views(folder, source: str, age: float) -> list[RankView]:
    """Return the views of two ranks: rank 0 waits in the loop, rank 1 after (or before) it."""
    path = folder / "train.py"
    path.write_text(source)
    name = "train" if "def train" in source else "<module>"
    inner = [Frame(str(path), find_line_number(source, "# WAITS"), name)]
    if name == "train":
        inner.append(Frame(str(path), find_line_number(source, "# CALLS"), "<module>"))
    gone = [Frame(str(path), find_line_number(source, "# GONE"), "<module>")]

    def view(rank: int, frames: list[Frame], operation: str) -> RankView:
        call = CollectiveCall("headway", 5, operation, age, None)
        return RankView(rank, beat_age=0.5, state="S", calls=(call,), frames=tuple(frames))

    return [view(0, inner, "all_reduce"), view(1, gone, "barrier")]


@pytest.mark.parametrize("source", [IN_MAIN, IN_EPOCHS, IN_FUNCTION], ids=["main", "epochs", "function"])
def test_rank_that_left_the_loop_is_named_when_all_ranks_wait(source, tmp_path):
    assert judge.diagnose_hang(make_views(tmp_path, source, 20), 600, 2) is None
    verdict = judge.diagnose_hang(make_views(tmp_path, source, 31), 600, 2)
    assert verdict is not None
    text = report.format_report(verdict)
    assert "rank 1 has left the loop in which the others are" in text
    assert re.search(
        rf"it has left the loop of \S*train.py:{find_line_number(source, '# LOOP')}\b.*, in which rank 0 waits", text
    )
    assert "accelerator.set_trigger()" in text
    assert judge.diagnose_hang(make_views(tmp_path, source, 31), 0, 2) is None


def test_rank_before_the_loop_is_not_reported_as_having_left_it(tmp_path):
    assert judge.diagnose_hang(make_views(tmp_path, RIGHT_ORDER, 31), 600, 2) is None
    verdict = judge.diagnose_hang(make_views(tmp_path, RIGHT_ORDER, 601), 600, 2)
    assert verdict is not None
    assert "their order differs" in report.format_report(verdict)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "after", ["wait_for_everyone", *(pytest.param(each, marks=pytest.mark.matrix) for each in list(AFTER)[1:])]
)
def test_run_with_a_rank_that_breaks_out_ends_before_the_timeout(after, tmp_path):
    err = run_loop(AFTER[after], tmp_path)
    assert "left the loop" in err, err
    assert "train.py:9" in err, err


@pytest.mark.matrix
def test_save_by_the_rank_that_broke_out_names_both_lines(tmp_path):
    """One rank alone can save replicated weights. The other rank's next update fails when the first process has ended."""
    err = run_loop("accelerator.save_state('checkpoint')", tmp_path)
    assert "save_state is called at train.py:15 on rank 1 only: rank 0 has continued to train.py:12" in err, err
    assert "rank 1 had finished the script by then" in err, err


def run_loop(after: str, folder: Path) -> str:
    """Run two ranks, one of which leaves its loop early and then executes the line `after`. Return stderr."""
    body = f"""
import torch
from headway import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(40, 2)), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
for step, (x,) in enumerate(loader):
    if step == 3 and accelerator.process_index == 1:
        break
    accelerator.backward(model(x).sum())
    optimizer.step()
    optimizer.zero_grad()
{after}
"""
    process = start_launch(folder, body, "--cpu", "-n", "2", "-q", "--timeout", "600")
    try:
        _, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 1, err
    return err
