"""Write the source of the documentation site into build/: docs/, and a reference page for each folder of the package.

`make docs` runs this script. A reference page has a directive for each public name, which mkdocstrings replaces by the docstring. The
reference pages exist only in build/.
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
"""Smallest number of public names for a page of its own; folders with fewer names share the last page."""
RETURNED = ("headway.core.data.loader.PreparedLoader", "headway.core.training.prepared.optimizer.PreparedOptimizer")
NAMES_MARKER = "<!-- names -->"
"""Line in docs/reference.md that the index of names replaces."""
_SCRIPT = re.compile(r"\]\(\.\./(examples/[\w/]+)\.py\)")
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)[^)]*\)")


def list_public_names() -> dict[str, list[str]]:
    """Return the dotted names of what `headway` exports, by folder or file of the source; the Accelerator is first."""
    dotted = [
        f"{headway._MODULES_OF_NAMES[name]}.{name}"
        for name in headway.__all__
        if headway._MODULES_OF_NAMES.get(name, "headway") != "headway"
    ]
    folders = {folder: list(names) for folder, names in groupby(sorted(dotted, key=_get_folder), key=_get_folder)}
    return {"accelerator": folders.pop("accelerator"), **folders}


def _get_folder(dotted: str) -> str:
    return dotted.split(".")[1]


def render_reference_pages() -> dict[str, str]:
    """Return the Markdown of the reference pages by path: a heading, a description, and a directive for each name."""
    names_by_folder = list_public_names()
    small = [folder for folder, names in names_by_folder.items() if len(names) < FEWEST and folder != "accelerator"]
    pages = {
        f"reference/{folder}.md": _render_page(_make_title(folder), _read_description(folder), names)
        for folder, names in names_by_folder.items()
        if folder not in small
    }
    pages["reference/prepared.md"] = _render_page(
        "What prepare() returns", "You do not build these yourself.", list(RETURNED)
    )
    rest = [name for folder in small for name in names_by_folder[folder]]
    pages["reference/rest.md"] = _render_page(
        "Everything else", "", sorted(rest, key=lambda name: name.split(".")[-1].lower())
    )
    pages["reference/errors.md"] = "# Errors\n\n::: headway.errors\n    options:\n      show_root_heading: false\n"
    return pages


def _make_title(folder: str) -> str:
    return "Accelerator" if folder == "accelerator" else folder.replace("_", " ").capitalize()


def _read_description(folder: str) -> str:
    package = ROOT / "src/headway" / folder / "__init__.py"
    return (ast.get_docstring(ast.parse(package.read_text())) or "").partition("\n")[0] if package.exists() else ""


def _render_page(title: str, description: str, names: list[str]) -> str:
    return "\n\n".join([f"# {title}", description, *(f"::: {name}" for name in names)]) + "\n"


def render_script_page(script: str) -> str:
    """Return the Markdown of a page with the code of a script.

    Args:
        script: Path of the script, relative to the repository.
    """
    code = (ROOT / script).read_text().rstrip()
    return f"# {Path(script).name}\n\n`{script}` in the repository:\n\n````python\n{code}\n````\n"


def read_names_by_task() -> dict[str, list[str]]:
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
    for task, names in read_names_by_task().items():
        rows = []
        for name in names:
            path, dotted = places[name]
            anchor = "" if name == "errors" else f"#{dotted}"
            rows.append(f"| [`{name}`]({path}{anchor}) | {_read_first_line(dotted)} |")
        parts.append("\n".join([f"### {task}", "", "| | |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def _read_first_line(dotted: str) -> str:
    """Return the first line of the docstring of a module, class or function, read without importing it."""
    module, _, name = dotted.rpartition(".")
    file = ROOT / "src" / Path(*dotted.split(".")).with_suffix(".py")
    if file.exists():
        definition: ast.AST = ast.parse(file.read_text())
    else:
        tree = ast.parse((ROOT / "src" / Path(*module.split(".")).with_suffix(".py")).read_text())
        kinds = (ast.ClassDef, ast.FunctionDef)
        definitions = [node for node in ast.walk(tree) if isinstance(node, kinds) and node.name == name]
        if not definitions:
            other = next(
                node.value.id
                for node in ast.walk(tree)
                if isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Name)
                and ast.unparse(node.targets[0]) == name
            )
            return f"Another name of `{other}`, for scripts written for Accelerate."
        definition = definitions[-1]  # overloads come first
    text = ast.get_docstring(definition) or ""  # type: ignore[arg-type]
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")


def write(has_versions: bool = False) -> None:
    """Write build/docs and build/mkdocs.yml.

    Args:
        has_versions: Whether the site has a menu of versions, which it fetches from its server.
    """
    target = BUILD / "docs"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "docs", target)
    scripts: set[str] = set()
    for page in target.glob("*.md"):
        text = page.read_text()
        scripts.update(_SCRIPT.findall(text))
        # The site has a page for each script that it links to, but not for the project's other files.
        page.write_text(_OUTSIDE.sub(r"\1", _SCRIPT.sub(r"](\1.md)", text)))
    for script in scripts:
        place = target / f"{script}.md"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(render_script_page(f"{script}.py"))
    pages = render_reference_pages()
    reference = target / "reference.md"
    reference.write_text(reference.read_text().replace(NAMES_MARKER, render_index_of_names(pages)))
    for path, text in pages.items():
        (target / path).parent.mkdir(exist_ok=True)
        (target / path).write_text(text)
    entries = "".join(f'    - "{text.partition(chr(10))[0].lstrip("# ")}": {path}\n' for path, text in pages.items())
    settings = (target / "site.yml").read_text()
    if has_versions:
        settings = settings.replace("extra:\n", "extra:\n  version: {provider: mike}\n")
    (BUILD / "mkdocs.yml").write_text(f"{settings}  - Reference:\n    - reference.md\n{entries}")
    (target / "site.yml").unlink()


if __name__ == "__main__":
    write("--versions" in sys.argv)
