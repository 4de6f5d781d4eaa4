"""Writes the annotated file tree of docs/files.md from the first line of every module's docstring.

`python scripts/tree.py` prints the tree; `--write` puts it between the markers in the page.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "files.md"
START, END = "<!-- tree -->", "<!-- /tree -->"
WHOLE = ("src/headway", "scripts", "examples", "benchmarks")
"""Folders shown file by file."""
FOLDERS = {
    "tests/unit": "mirrors src/headway; no processes, under a minute",
    "tests/distributed": "the same things on real gloo processes",
    "tests/accelerator": "an accelerator that no part of Headway names, built here and run on the host",
    "tests/house": "the rules of this house: layers, sizes, names, this tree",
    "tests/docs": "runs every code block of README.md and docs/",
    "tests/wrong_use": "a table of mistakes by layout, each cell compared with a hand-written loop; docs/wrong_use_table.md shows it",
    "tests/synchronizations": "counts how often the host waits for the device, on a device that is none",
    "tests/gpu": "what needs a GPU; never needed to pass",
    "docs": "tutorial, how-to pages, architecture; `make docs` builds the site",
}
"""Folders shown as one line."""
INDENT = 2
COLUMN = 26


def first_line(file: Path) -> str:
    """The first line of the module's docstring; empty where it has none."""
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    return docstring.partition("\n")[0].strip()


def entries(folder: Path, depth: int) -> list[str]:
    """One line for the folder, then its files, then its folders."""
    initial = folder / "__init__.py"
    lines = [_line(folder.name + "/", first_line(initial) if initial.exists() else "", depth)]
    for file in sorted(folder.glob("*.py")):
        if file.name != "__init__.py":
            lines.append(_line(file.name, first_line(file), depth + 1))
    for inner in sorted(path for path in folder.iterdir() if path.is_dir()):
        if any(inner.rglob("*.py")) and inner.name != "__pycache__":
            lines += entries(inner, depth + 1)
    return lines


def _line(name: str, text: str, depth: int) -> str:
    return f"{' ' * (INDENT * depth) + name:<{COLUMN}}  {text}".rstrip()


def tree(root: Path = ROOT) -> str:
    """The whole tree as text."""
    lines: list[str] = []
    for name in WHOLE:
        folder = root / name
        if folder.is_dir() and any(folder.rglob("*.py")):
            shown = entries(folder, 0)
            shown[0] = _line(name + "/", shown[0].partition("/")[2].strip(), 0)
            lines += shown
    lines += [_line(name + "/", text, 0) for name, text in FOLDERS.items()]
    return "\n".join(lines)


def block(root: Path = ROOT) -> str:
    """The tree as the page holds it, markers included."""
    return f"{START}\n```text\n{tree(root)}\n```\n{END}"


def written(page: str, root: Path = ROOT) -> str:
    """The page's text with a fresh tree."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return before + block(root) + after


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(written(PAGE.read_text()))
    else:
        print(tree())
