"""The notebooks in examples/notebooks run from their first cell to their last; their own assertions say what they prove."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=pytest.mark.slow if path.stem == "first_loop" else pytest.mark.matrix)
        for path in NOTEBOOKS
    ],
)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(path, as_version=4)
    assert sum("assert " in cell.source for cell in notebook.cells) >= 1, "a notebook that proves nothing"
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    errors = [each for cell in notebook.cells for each in cell.get("outputs", []) if each.output_type == "error"]
    assert not errors


def test_notebooks_are_kept_without_what_they_printed():
    assert len(NOTEBOOKS) == 5
    for path in NOTEBOOKS:
        cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        assert all(not cell.outputs and cell.execution_count is None for cell in cells), path.name
