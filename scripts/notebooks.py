"""Run the notebooks of examples/notebooks and store their outputs in them: `python scripts/notebooks.py --write [NAME...]`.

Without `--write`, print what differs from the stored outputs. The suite compares them in the same way
(`tests/docs/test_notebooks.py`). Only the number of images is compared. Two tags of a cell leave out more:
`numbers-vary` (numbers, and how often a list repeats an item) and `text-varies` (the text).
"""

import argparse
import difflib
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "notebooks"
NUMBERS_VARY = "numbers-vary"
"""Tag of a cell whose output has numbers that differ between machines or runs."""

TEXT_VARIES = "text-varies"
"""Tag of a cell whose output has other words on another machine or in another run."""

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
_TIME = re.compile(r"\bin \d+(?:\.\d+)? s\b")
_TEMPORARY = re.compile(r"/\S*/(?:tmp\w+|ipykernel_\d+)/")
_REPEATED = re.compile(r"(\([^()]*\)|\S+)(?:, \1)+")


def run_notebook(path: Path, folder: Path) -> Any:
    """Execute a notebook from its first cell to its last and return it with its outputs, without stderr.

    stderr has progress bars, and library warnings with paths of this machine.

    Args:
        path: File of the notebook. It is not changed.
        folder: Working directory of the notebook.
    """
    notebook = nbformat.read(path, as_version=4)
    metadata = dict(notebook.metadata)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=300, resources=resources, record_timing=False).execute()
    notebook.metadata = nbformat.from_dict(metadata)  # the kernel adds the version of this Python
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = _join_streams([output for output in cell.outputs if output.get("name") != "stderr"])
    return notebook


def _join_streams(outputs: list[Any]) -> list[Any]:
    """Return the outputs with adjacent pieces of one stream joined, because the kernel cuts them at random places."""
    joined: list[Any] = []
    for output in outputs:
        former = joined[-1] if joined else None
        if former is not None and output.output_type == former.output_type == "stream" and output.name == former.name:
            former.text += output.text
        else:
            joined.append(output)
    return joined


def describe_outputs(notebook: Any) -> list[str]:
    """Return the outputs of a notebook as lines of text, without what may differ between two runs."""
    lines = []
    for cell in (candidate for candidate in notebook.cells if candidate.cell_type == "code"):
        lines.append(f"cell {cell.id}:")
        for output in cell.outputs:
            tags = cell.metadata.get("tags", ())
            text = output.text if output.output_type == "stream" else output.data.get("text/plain", "")
            text = _TEMPORARY.sub("FOLDER/", _TIME.sub("in # s", text))
            if TEXT_VARIES in tags:
                text = "(text)"
            elif NUMBERS_VARY in tags:
                text = _REPEATED.sub(r"\1, ...", _NUMBER.sub("#", text))
            lines += [*text.splitlines(), *(kind for kind in output.get("data", ()) if kind != "text/plain")]
    return lines


def compare_outputs(stored: Any, new: Any) -> str:
    """Return the lines in which the outputs of two versions of a notebook differ, as a diff, or "" if they are equal.

    Args:
        stored: Notebook with the stored outputs.
        new: Notebook that has just been executed.
    """
    return "\n".join(
        difflib.unified_diff(describe_outputs(stored), describe_outputs(new), "stored", "new", lineterm="")
    )


def main() -> None:
    """Execute the notebooks, and store or compare their outputs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="notebooks without .ipynb; default: all")
    parser.add_argument("--write", action="store_true", help="store the outputs")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    has_changed = False
    for path in [FOLDER / f"{name}.ipynb" for name in arguments.names] or sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            executed = run_notebook(path, Path(folder))
        if changes := compare_outputs(nbformat.read(path, as_version=4), executed):
            has_changed = True
            print(path.name, changes, sep="\n")
        if arguments.write:
            nbformat.write(executed, path)
    sys.exit(has_changed and not arguments.write)


if __name__ == "__main__":
    main()
