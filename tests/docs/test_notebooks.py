"""The notebooks in examples/notebooks run completely and print the outputs that are stored in them."""

import sys

import nbformat
import pytest

from tests.house.tree_of_source import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import notebooks

NOTEBOOKS = sorted(notebooks.FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=pytest.mark.slow if path.stem == "first_loop" else pytest.mark.matrix)
        for path in NOTEBOOKS
    ],
)
def test_notebook_runs_and_its_stored_outputs_are_current(path, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    stored = nbformat.read(path, as_version=4)
    assert sum("assert " in cell.source for cell in stored.cells) >= 1, "this notebook has no assertion"
    found = notebooks.run_notebook(path, tmp_path)
    changes = notebooks.compare_outputs(stored, found)
    assert not changes, f"python scripts/notebooks.py --write {path.stem} stores these outputs:\n{changes}"


def test_notebooks_are_stored_as_they_ran():
    assert len(NOTEBOOKS) == 5
    for path in NOTEBOOKS:
        cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), path.name
        assert sum(len(cell.outputs) for cell in cells) >= 2, path.name
        assert all(
            each.output_type != "error" and each.get("name") != "stderr" for cell in cells for each in cell.outputs
        )


def make_notebook(*texts, tags=()):
    outputs = [nbformat.v4.new_output("stream", name="stdout", text=text) for text in texts]
    cell = nbformat.v4.new_code_cell("1", outputs=outputs, metadata={"tags": list(tags)}, id="a")
    return nbformat.v4.new_notebook(cells=[cell])


@pytest.mark.parametrize(
    ("stored", "found", "tags", "is_current"),
    [
        ("loss 0.5", "loss 0.5", [], True),
        ("loss 0.5", "loss 0.6", [], False),
        ("loss 0.5", "loss 6e-07", ["numbers-vary"], True),
        ("loss 0.5", "cost 0.5", ["numbers-vary"], False),
        ("[(0, 256), (1, 256)]", "[(0, 256), (1, 128), (1, 128)]", ["numbers-vary"], True),
        ("[(0, 256), (1, 256)]", "[]", ["numbers-vary"], False),
        ("two", "three", ["text-varies"], True),
        ("traced in 6.5 s", "traced in 7 s", [], True),
        ("from /tmp/tmpab1/run/1", "from /var/tmp/tmpcd2/run/1", [], True),
        ("from /tmp/tmpab1/run/1", "from /tmp/tmpab1/run/2", [], False),
    ],
)
def test_comparison_ignores_values_that_vary(stored, found, tags, is_current):
    changes = notebooks.compare_outputs(make_notebook(stored, tags=tags), make_notebook(found, tags=tags))
    assert (not changes) == is_current, changes


def test_added_or_missing_output_is_a_change():
    assert notebooks.compare_outputs(make_notebook("a"), make_notebook("a", "b"))
    assert notebooks.compare_outputs(make_notebook("a", tags=["text-varies"]), make_notebook(tags=["text-varies"]))
