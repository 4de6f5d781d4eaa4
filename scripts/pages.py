"""Writes what the site is built from into build/: docs/ as it is, and a reference page for each folder of the source.

`make docs` runs it. A reference page holds a directive for each public name, which mkdocstrings fills in from the docstring; these
pages exist in build/ only.
"""

import ast
import re
import shutil
import sys
from itertools import groupby
from pathlib import Path

import headway

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
FEWEST = 3
"""Folders with fewer public names share the last page."""
RETURNED = ("headway.data.loader.PreparedLoader", "headway.training.prepared.optimizer.PreparedOptimizer")
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)[^)]*\)")


def public_names() -> dict[str, list[str]]:
    """The dotted places of what `headway` exports, by the folder or file they lie in; Accelerator first."""
    dotted = [f"{place}.{name}" for name, place in headway._PLACES.items() if place != "headway"]
    rooms = {room: list(found) for room, found in groupby(sorted(dotted, key=_room), key=_room)}
    return {"accelerator": rooms.pop("accelerator"), **rooms}


def _room(dotted: str) -> str:
    return dotted.split(".")[1]


def reference_pages() -> dict[str, str]:
    """Markdown by the page's path: a heading, what the folder is for, and a directive for each name."""
    rooms = public_names()
    small = [room for room, names in rooms.items() if len(names) < FEWEST and room != "accelerator"]
    pages = {
        f"reference/{room}.md": _page(_title(room), _about(room), rooms[room]) for room in rooms if room not in small
    }
    pages["reference/prepared.md"] = _page("What prepare() returns", "You do not build these yourself.", list(RETURNED))
    rest = [name for room in small for name in rooms[room]]
    pages["reference/rest.md"] = _page(
        "Everything else", "", sorted(rest, key=lambda name: name.split(".")[-1].lower())
    )
    pages["reference/errors.md"] = "# Errors\n\n::: headway.errors\n    options:\n      show_root_heading: false\n"
    return pages


def _title(room: str) -> str:
    return "Accelerator" if room == "accelerator" else room.replace("_", " ").capitalize()


def _about(room: str) -> str:
    package = ROOT / "src/headway" / room / "__init__.py"
    return (ast.get_docstring(ast.parse(package.read_text())) or "").partition("\n")[0] if package.exists() else ""


def _page(title: str, about: str, names: list[str]) -> str:
    return "\n\n".join([f"# {title}", about, *(f"::: {name}" for name in names)]) + "\n"


def write(has_versions: bool = False) -> None:
    """Write build/docs and build/mkdocs.yml; with versions, whose menu the site fetches, it is meant for a server."""
    target = BUILD / "docs"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "docs", target)
    for page in target.glob("*.md"):
        # The site does not hold the project's other files.
        page.write_text(_OUTSIDE.sub(r"\1", page.read_text()))
    pages = reference_pages()
    for path, text in pages.items():
        (target / path).parent.mkdir(exist_ok=True)
        (target / path).write_text(text)
    shown = "".join(f'    - "{text.partition(chr(10))[0].lstrip("# ")}": {path}\n' for path, text in pages.items())
    settings = (target / "site.yml").read_text()
    if has_versions:
        settings = settings.replace("extra:\n", "extra:\n  version: {provider: mike}\n")
    (BUILD / "mkdocs.yml").write_text(f"{settings}  - Reference:\n    - reference.md\n{shown}")
    (target / "site.yml").unlink()


if __name__ == "__main__":
    write("--versions" in sys.argv)
