"""No two files of Headway import each other, however far the way round: not at import time, not in a function, not for types."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.house.tree_of_source import SOURCE, modules, parsed


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, modules: set[str]) -> Iterator[str]:
    """Every module of ours that is named in an import statement, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            for name in node.names:
                submodule = f"{node.module}.{name.name}"
                yield submodule if submodule in modules else node.module


def graph(trees: Mapping[str, ast.AST]) -> dict[str, set[str]]:
    """Who imports whom."""
    return {name: set(imported(tree, set(trees))) - {name} for name, tree in trees.items()}


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
    edges = graph({module_of(path): parsed(path) for path in modules("src")})
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
    assert circles(graph(trees)) == [frozenset("abc")]
    assert circles(graph({**trees, "c": ast.parse("")})) == []
