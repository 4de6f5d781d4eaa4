"""What installed libraries take from Accelerate, read from their source, and which of it the `accelerate` of this process lacks.

`python -m tests.ecosystem.names_used LIBRARY...` prints a JSON object. Lazy imports are found like any others; what is imported
by a computed name is not.
"""

import ast
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import accelerate

OBJECTS = ("accelerator.", "self.accelerator.", "trainer.accelerator.", "self.trainer.accelerator.")
"""What an Accelerator is called there."""


def sources(library: str) -> Iterator[tuple[str, ast.Module]]:
    """Each of its files that speaks of Accelerate or of an accelerator, by its name and parsed."""
    spec = importlib.util.find_spec(library)
    assert spec is not None
    for root in spec.submodule_search_locations or ():
        for path in sorted(Path(root).rglob("*.py")):
            text = path.read_text()
            if "accelerat" in text:
                yield f"{library}/{path.relative_to(root)}", ast.parse(text)


def chain(node: ast.AST) -> str:
    """`a.b.c` of an attribute of attributes of a name, else nothing."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        front = chain(node.value)
        return f"{front}.{node.attr}" if front else ""
    return ""


def used(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(kind, name): ("import", "module:name"), ("import", "module:"), ("attribute", "accelerate.x.y") or ("member", "x.y")."""
    nodes = list(ast.walk(tree))
    bound = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "accelerate":
            yield from (("import", f"{node.module}:{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "accelerate":
                    yield "import", f"{alias.name}:"
                    bound.add(alias.asname or "accelerate")
    for node in nodes:
        if isinstance(node, ast.Attribute):
            name = chain(node)
            if name.split(".")[0] in bound:
                yield "attribute", name
            for start in OBJECTS:
                if name.startswith(start):
                    yield "member", name.removeprefix(start)


def missing(kind: str, name: str, accelerator: accelerate.Accelerator) -> str:
    """Why it cannot be had here; empty where it can."""
    try:
        if kind == "import":
            module, _, what = name.partition(":")
            exec(f"from {module} import {what}" if what else f"import {module}")
            return ""
        parts = name.split(".") if kind == "member" else name.split(".")[1:]
        found = accelerator if kind == "member" else accelerate
        for part in parts:
            # A plugin that this run does not have: what would be asked of it cannot be told from here.
            found = None if found is None else getattr(found, part)
    except (ImportError, AttributeError) as failure:
        return f"{type(failure).__name__}: {failure}"
    return ""


def look(libraries: list[str]) -> dict[str, object]:
    """Counts by library and kind, of files and of names in all, and what is missing with the file that asks for it."""
    accelerator = accelerate.Accelerator(cpu=True)
    places: dict[tuple[str, str], str] = {}
    counts: dict[str, dict[str, int]] = {}
    for library in libraries:
        mine: set[tuple[str, str]] = set()
        files = set()
        for file, tree in sources(library):
            for each in used(tree):
                mine.add(each)
                files.add(file)
                places.setdefault(each, file)
        kinds = [kind for kind, _ in mine]
        counts[library] = {
            "files": len(files),
            **{kind: kinds.count(kind) for kind in ("import", "attribute", "member")},
        }
    reasons = {f"{kind} {name}": (file, missing(kind, name, accelerator)) for (kind, name), file in places.items()}
    return {
        "is_headway": hasattr(accelerate, "__headway_version__"),
        "counts": counts,
        "names": sorted(f"{kind} {name}" for kind, name in places),
        "missing": {name: [file, why] for name, (file, why) in reasons.items() if why},
    }


if __name__ == "__main__":
    print(json.dumps(look(sys.argv[1:])))
