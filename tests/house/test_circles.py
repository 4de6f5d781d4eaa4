"""No two files of Headway import each other, not even through other files.

Imports inside functions and for types count, and so do modules that are named in `import_module("...")`, `LazyModule("...")`
and in the registry of extensions.
"""

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

from scripts.core import Places, find_imports, read_registry
from tests.house.tree_of_source import SOURCE, list_modules, parse_module


def get_module_name(path: Path) -> str:
    """Return the dotted module name of a source file."""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def build_graph(trees: Mapping[str, ast.AST], places: Places) -> dict[str, set[str]]:
    """Return the modules that each module imports."""
    return {name: set(find_imports(tree, trees, places)) - {name} for name, tree in trees.items()}


def find_cycles(edges: dict[str, set[str]]) -> list[frozenset[str]]:
    """Return the groups of modules that import each other, directly or through other modules."""
    reached = {name: find_reachable(name, edges) for name in edges}
    found = {frozenset(other for other in reached[name] if name in reached[other]) for name in edges}
    return [group for group in found if len(group) > 1]


def find_reachable(start: str, edges: dict[str, set[str]]) -> set[str]:
    """Return the modules that can be reached from `start` through one or more imports."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for each in edges[waiting.pop()] - seen:
            seen.add(each)
            waiting.append(each)
    return seen


def test_no_import_cycles() -> None:
    edges = build_graph({get_module_name(path): parse_module(path) for path in list_modules("src")}, read_registry())
    told = "\n".join(", ".join(sorted(group)) for group in find_cycles(edges))
    assert not told, f"files that import each other:\n{told}"


def test_cycle_is_found_for_every_kind_of_import_statement() -> None:
    sources = {
        "a": "import b",
        "b": "def f():\n    from c import x",
        "c": "if TYPE_CHECKING:\n    import a",
        "d": "import a",
    }
    trees = {name: ast.parse(text) for name, text in sources.items()}
    assert find_cycles(build_graph(trees, {})) == [frozenset("abc")]
    assert find_cycles(build_graph({**trees, "c": ast.parse("")}, {})) == []


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
def test_cycle_is_found_if_the_module_is_named_in_a_string(statement: str) -> None:
    trees = {"a": ast.parse("import b"), "b": ast.parse(f"def f():\n    {statement}")}
    assert find_cycles(build_graph(trees, {"feature": {"first": "a:f"}})) == [frozenset("ab")]
    assert find_cycles(build_graph(trees, {"feature": {"first": "c:f"}})) == (
        [] if "extensions" in statement else [frozenset("ab")]
    )
