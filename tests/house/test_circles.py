"""No two files of Headway import each other, not even through other files.

Imports inside functions and for types count, and so do modules that are named in `import_module("...")`, `LazyModule("...")`
and in the registry of extensions.
"""

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

from scripts.core import Places, find_imports, read_registry
from tests.house.tree_of_source import SOURCE, modules, parsed


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def graph(trees: Mapping[str, ast.AST], places: Places) -> dict[str, set[str]]:
    """Return the modules that each module imports."""
    return {name: set(find_imports(tree, trees, places)) - {name} for name, tree in trees.items()}


def circles(edges: dict[str, set[str]]) -> list[frozenset[str]]:
    """Groups of modules each of which can be reached from every other one."""
    reached = {name: reachable(name, edges) for name in edges}
    found = {frozenset(other for other in reached[name] if name in reached[other]) for name in edges}
    return [group for group in found if len(group) > 1]


def reachable(start: str, edges: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for each in edges[waiting.pop()] - seen:
            seen.add(each)
            waiting.append(each)
    return seen


def test_no_circles() -> None:
    edges = graph({module_of(path): parsed(path) for path in modules("src")}, read_registry())
    told = "\n".join(", ".join(sorted(group)) for group in circles(edges))
    assert not told, f"files that import each other:\n{told}"


def test_a_circle_is_seen_wherever_the_import_stands() -> None:
    sources = {
        "a": "import b",
        "b": "def f():\n    from c import x",
        "c": "if TYPE_CHECKING:\n    import a",
        "d": "import a",
    }
    trees = {name: ast.parse(text) for name, text in sources.items()}
    assert circles(graph(trees, {})) == [frozenset("abc")]
    assert circles(graph({**trees, "c": ast.parse("")}, {})) == []


@pytest.mark.parametrize(
    "statement",
    [
        'import_module("a")',
        'importlib.import_module("a")',
        'LazyModule("a:name")',
        'extensions.load("feature", "first")',
        'extensions.load("feature", word)',
    ],
)
def test_a_circle_is_seen_through_a_name(statement: str) -> None:
    trees = {"a": ast.parse("import b"), "b": ast.parse(f"def f():\n    {statement}")}
    assert circles(graph(trees, {"feature": {"first": "a:f"}})) == [frozenset("ab")]
    assert circles(graph(trees, {"feature": {"first": "c:f"}})) == (
        [] if "extensions" in statement else [frozenset("ab")]
    )
