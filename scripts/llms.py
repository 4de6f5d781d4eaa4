"""Add llms.txt and one Markdown file per page to the built site, so that AI assistants can answer from the documentation.

`make docs` runs this script after it has built the site. llms.txt has the form of llmstxt.org: a title, a summary, and links by
group. mkdocstrings directives are replaced by signatures and docstrings, which are read from the source without importing it.
"""

import ast
import re
from pathlib import Path

import navigation
import pages

SITE = pages.BUILD / "site"
_DIRECTIVE = re.compile(r"^::: (\S+)$(?:\n    options:\n(?:      .*\n)+)?", re.MULTILINE)
_SUMMARY = re.compile(r"# Headway\n\n(.*?)\n\n", re.DOTALL)


def find_definition(dotted: str) -> ast.Module | ast.ClassDef | ast.FunctionDef | None:
    """Return the syntax tree of a module, class or function, given its dotted name. None if the name is an alias."""
    path = pages.ROOT / "src" / Path(*dotted.split(".")).with_suffix(".py")
    if path.exists():
        return ast.parse(path.read_text())
    module, _, name = dotted.rpartition(".")
    tree = ast.parse((pages.ROOT / "src" / Path(*module.split(".")).with_suffix(".py")).read_text())
    definitions = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name]
    return definitions[-1] if definitions else None  # overloads come first


def render_definition(node: ast.Module | ast.ClassDef | ast.FunctionDef, name: str) -> str:
    """Return the signature and docstring of an object, and those of its public methods or classes, as Markdown."""
    parts = [f"## {name}"]
    if isinstance(node, ast.FunctionDef):
        parts.append(f"```python\n{_signature(node)}\n```")
    parts.append(ast.get_docstring(node) or "")
    if not isinstance(node, ast.FunctionDef):
        for child in node.body:
            if not isinstance(child, ast.ClassDef | ast.FunctionDef):
                continue
            is_public = child.name[0] != "_" and ast.get_docstring(child) is not None
            if is_public or child.name == "__init__":
                parts.append(render_definition(child, f"{name}.{child.name}").replace("## ", "### ", 1))
    return "\n\n".join(part for part in parts if part)


def _signature(node: ast.FunctionDef) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"def {node.name}({ast.unparse(node.args)}){returns}"


def render_page(text: str) -> str:
    """Return the Markdown of a page, with the docstrings of the objects that its directives name."""

    def replace(match: re.Match[str]) -> str:
        node = find_definition(match[1])
        name = match[1].rpartition(".")[2]
        return f"## {name}" if node is None else render_definition(node, name)

    return _DIRECTIVE.sub(replace, text)


def render_llms(reference: list[str]) -> str:
    """Return the text of llms.txt.

    Args:
        reference: Paths of the reference pages.
    """
    summary = _SUMMARY.search((navigation.DOCS / "index.md").read_text())
    assert summary is not None, "docs/index.md must begin with a title and a summary"
    lines = ["# Headway", "", "> " + " ".join(summary[1].split()), ""]
    for group in navigation.read_groups():
        lines += [f"## {group.title}", ""]
        lines += [
            f"- [{navigation.read_title(page)}]({page}): {text}" for page, text in (group.pages | group.more).items()
        ]
        lines.append("")
    lines += ["## Reference of names", "", *(f"- [{Path(path).stem}]({path})" for path in reference), ""]
    return "\n".join(lines)


def write(source: Path = pages.BUILD / "docs", target: Path = SITE) -> None:
    """Write llms.txt and the Markdown files.

    Args:
        source: Folder of the site's Markdown, as scripts/pages.py writes it.
        target: Folder of the built site.
    """
    for page in sorted(source.rglob("*.md")):
        path = target / page.relative_to(source)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render_page(page.read_text()))
    reference = sorted(str(page.relative_to(source)) for page in (source / "reference").glob("*.md"))
    (target / "llms.txt").write_text(render_llms(reference))


if __name__ == "__main__":
    write()
