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

import yaml

import headway

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
FEWEST = 3
"""Folders with fewer public names share the last page."""
RETURNED = ("headway.core.data.loader.PreparedLoader", "headway.core.training.prepared.optimizer.PreparedOptimizer")
NAMES_MARKER = "<!-- names -->"
"""Line in docs/reference.md that the index of names replaces."""
_SCRIPT = re.compile(r"\]\(\.\./(examples/[\w/]+)\.py\)")
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)[^)]*\)")


def public_names() -> dict[str, list[str]]:
    """The dotted places of what `headway` exports, by the folder or file they lie in; Accelerator first."""
    dotted = [
        f"{headway._MODULES_OF_NAMES[name]}.{name}"
        for name in headway.__all__
        if headway._MODULES_OF_NAMES.get(name, "headway") != "headway"
    ]
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


def script_page(script: str) -> str:
    """Return the Markdown of a page with the code of a script.

    Args:
        script: Path of the script, relative to the repository.
    """
    code = (ROOT / script).read_text().rstrip()
    return f"# {Path(script).name}\n\n`{script}` in the repository:\n\n````python\n{code}\n````\n"


def names_by_task() -> dict[str, list[str]]:
    """Return the public names of docs/reference_names.yml, by task."""
    groups: dict[str, list[str]] = yaml.safe_load((ROOT / "docs" / "reference_names.yml").read_text())
    return groups


def render_index_of_names(pages: dict[str, str]) -> str:
    """Return a table of names for each task. Each name links to its place on a reference page.

    Args:
        pages: Markdown of the reference pages by path, as `reference_pages` returns them.
    """
    places = {}
    for path, text in pages.items():
        for dotted in re.findall(r"^::: (\S+)$", text, re.MULTILINE):
            places[dotted.rpartition(".")[2]] = (path, dotted)
    places["errors"] = ("reference/errors.md", "headway.errors")
    parts = []
    for task, names in names_by_task().items():
        rows = []
        for name in names:
            path, dotted = places[name]
            anchor = "" if name == "errors" else f"#{dotted}"
            rows.append(f"| [`{name}`]({path}{anchor}) | {_first_line(dotted)} |")
        parts.append("\n".join([f"### {task}", "", "| | |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def _first_line(dotted: str) -> str:
    """Return the first line of the docstring of a module, class or function, read without importing it."""
    module, _, name = dotted.rpartition(".")
    file = ROOT / "src" / Path(*dotted.split(".")).with_suffix(".py")
    if file.exists():
        node: ast.AST = ast.parse(file.read_text())
    else:
        tree = ast.parse((ROOT / "src" / Path(*module.split(".")).with_suffix(".py")).read_text())
        named = (ast.ClassDef, ast.FunctionDef)
        found = [each for each in ast.walk(tree) if isinstance(each, named) and each.name == name]
        if not found:
            other = next(
                each.value.id
                for each in ast.walk(tree)
                if isinstance(each, ast.Assign)
                and isinstance(each.value, ast.Name)
                and ast.unparse(each.targets[0]) == name
            )
            return f"Another name of `{other}`, for scripts written for Accelerate."
        node = found[-1]  # overloads come first
    text = ast.get_docstring(node) or ""  # type: ignore[arg-type]
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")


def write(has_versions: bool = False) -> None:
    """Write build/docs and build/mkdocs.yml; with versions, whose menu the site fetches, it is meant for a server."""
    target = BUILD / "docs"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "docs", target)
    scripts: set[str] = set()
    for page in target.glob("*.md"):
        text = page.read_text()
        scripts.update(_SCRIPT.findall(text))
        # The site has a page for each script that it links to, and none of the project's other files.
        page.write_text(_OUTSIDE.sub(r"\1", _SCRIPT.sub(r"](\1.md)", text)))
    for script in scripts:
        place = target / f"{script}.md"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(script_page(f"{script}.py"))
    pages = reference_pages()
    reference = target / "reference.md"
    reference.write_text(reference.read_text().replace(NAMES_MARKER, render_index_of_names(pages)))
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
