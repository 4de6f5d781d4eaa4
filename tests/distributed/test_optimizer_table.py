"""The table of docs/optimizers.md: a sample of its rows in each run of the tests, all of them in the matrix."""

import sys
from pathlib import Path

import pytest

from tests.distributed.optimizer_table import CHANGED, LAYOUTS, is_as_good, judge, list_names, run_layout

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import optimizers

pytest.importorskip("pytorch_optimizer", reason="pytorch_optimizer is not installed")


def check(names: list[str], layout: str, folder: Path) -> None:
    page = optimizers.read_cells(layout)
    expected = run_layout(names, None, folder / "hand")
    changed = run_layout(names, CHANGED, folder / "changed")
    found = run_layout(names, layout, folder / "rows")
    cells = {name: judge(expected[name], changed[name], found[name]) for name in names}
    other = {name: (cell, page[name]) for name, cell in cells.items() if not is_as_good(cell, page[name])}
    assert not other, "measured now, and on the page"


def test_a_sample_under_fsdp(tmp_path):
    check(["lamb", "prodigy", "shampoo"], "fsdp", tmp_path)


@pytest.mark.matrix
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_row(layout, tmp_path):
    check(list_names(), layout, tmp_path)
