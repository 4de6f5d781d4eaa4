"""Write the annotated file tree of docs/files.md from the first line of every module's docstring.

`python scripts/tree.py` prints the tree; `--write` replaces the tree in the page.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "files.md"
START, END = "<!-- tree -->", "<!-- /tree -->"
LISTED_FOLDERS = ("src/headway", "scripts", "examples", "benchmarks")
"""Folders whose files are listed."""
FOLDERS = {
    "tests/unit": "mirrors src/headway; no processes, under a minute",
    "tests/distributed": "tests on real gloo processes",
    "tests/accelerator": "a kind of accelerator that Headway does not know, built here and run on the host",
    "tests/house": "rules of this repository: layers, sizes, names, this tree",
    "tests/docs": "runs every code block of README.md and docs/",
    "tests/wrong_use": "a table of mistakes by layout, each cell compared with a hand-written loop; docs/wrong_use_table.md shows it",
    "tests/synchronizations": "counts how often the host waits for the device, on a fake device",
    "tests/gpu": "tests that need a GPU; they skip themselves without one",
    "docs": "tutorial, how-to pages, architecture; `make docs` builds the site",
}
"""Folders shown as one line."""
INDENT = 2
COLUMN = 26


def read_first_line(file: Path) -> str:
    """Return the first line of a module's docstring, or "" without one."""
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    return docstring.partition("\n")[0].strip()


def list_entries(folder: Path, depth: int) -> list[str]:
    """Return the lines of a folder: the folder, its files, then its subfolders."""
    initial = folder / "__init__.py"
    lines = [_format_line(folder.name + "/", read_first_line(initial) if initial.exists() else "", depth)]
    for file in sorted(folder.glob("*.py")):
        if file.name != "__init__.py":
            lines.append(_format_line(file.name, read_first_line(file), depth + 1))
    for subfolder in sorted(path for path in folder.iterdir() if path.is_dir()):
        if any(subfolder.rglob("*.py")) and subfolder.name != "__pycache__":
            lines += list_entries(subfolder, depth + 1)
    return lines


def _format_line(name: str, text: str, depth: int) -> str:
    return f"{' ' * (INDENT * depth) + name:<{COLUMN}}  {text}".rstrip()


def render_tree(root: Path = ROOT) -> str:
    """Return the whole tree as text."""
    lines: list[str] = []
    for name in LISTED_FOLDERS:
        folder = root / name
        if folder.is_dir() and any(folder.rglob("*.py")):
            folder_lines = list_entries(folder, 0)
            folder_lines[0] = _format_line(name + "/", folder_lines[0].partition("/")[2].strip(), 0)
            lines += folder_lines
    lines += [_format_line(name + "/", text, 0) for name, text in FOLDERS.items()]
    return "\n".join(lines)


def render_block(root: Path = ROOT) -> str:
    """Return the tree with its markers, as the page contains it."""
    return f"{START}\n```text\n{render_tree(root)}\n```\n{END}"


def replace_tree(page: str, root: Path = ROOT) -> str:
    """Return the text of a page with a new tree."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return before + render_block(root) + after


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(replace_tree(PAGE.read_text()))
    else:
        print(render_tree())
