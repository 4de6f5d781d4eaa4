"""Checks of the table in docs/optimizers.md: a sample of its rows in every run, and all rows in the matrix."""

import sys
from pathlib import Path

import pytest

from tests.distributed.optimizer_table import CHANGED, LAYOUTS, is_as_good, judge, list_names, run_layout

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import optimizers

pytest.importorskip("pytorch_optimizer", reason="pytorch_optimizer is not installed")


def check_rows(names: list[str], layout: str, folder: Path) -> None:
    page = optimizers.read_cells(layout)
    expected = run_layout(names, None, folder / "hand")
    changed = run_layout(names, CHANGED, folder / "changed")
    found = run_layout(names, layout, folder / "rows")
    cells = {name: judge(expected[name], changed[name], found[name]) for name in names}
    other = {name: (cell, page[name]) for name, cell in cells.items() if not is_as_good(cell, page[name])}
    assert not other, "cells as (measured now, on the page)"


def test_sample_of_rows_in_the_table_is_true_under_fsdp(tmp_path):
    check_rows(["lamb", "prodigy", "shampoo", "splus"], "fsdp", tmp_path)


@pytest.mark.matrix
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_rows_of_the_table_are_true(layout, tmp_path):
    check_rows(list_names(), layout, tmp_path)
