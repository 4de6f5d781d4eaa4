"""Prints what importing the Accelerator reaches: lines of code by folder. `python scripts/core.py --files` lists the files.

The closure follows every import statement, also those inside functions and those for types, and the modules that are
named by `LazyModule("...")` or `import_module("...")`. It does not follow the registry of extensions, which is the only way
from the core to an extension. The exit code is 1 if an extension is reached in any other way.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.lines import SOURCE, count

START = "headway.accelerator"
EXTENSIONS = (
    "cli",
    "compat",
    "extras",
    "forecasting",
    "integrations",
    "language_data",
    "layouts",
    "offload",
    "planning",
    "trainer",
    "verify",
)
"""Packages that the core never imports."""
REGISTRY = SOURCE / "core" / "extensions.py"

Places = Mapping[str, Mapping[str, str]]
"""{kind of extension: {public word: "module:name"}}."""


def find_modules() -> dict[str, Path]:
    """Return the file of every module of Headway by its name."""
    found = {}
    for file in SOURCE.rglob("*.py"):
        parts = file.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def read_registry() -> Places:
    """Return the places of all extensions, as `headway.core.extensions` lists them."""
    for node in ast.parse(REGISTRY.read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_PLACES" and node.value is not None:
            places: Places = ast.literal_eval(node.value)
            return places
    raise ValueError(f"{REGISTRY} does not assign _PLACES")


def find_imports(tree: ast.AST, modules: Mapping[str, object], places: Places | None = None) -> Iterator[str]:
    """Yield the modules that a file imports, wherever in the file the import is.

    Args:
        tree: Syntax tree of the file.
        modules: Modules of Headway by name. Others are left out.
        places: Registry of extensions. Modules that the file loads through it are yielded too. None: they are not.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            for name in node.names:
                submodule = f"{node.module}.{name.name}"
                yield submodule if submodule in modules else str(node.module)
        elif isinstance(node, ast.Call):
            yield from (name for name in find_named(node, places or {}) if name in modules)


def find_named(call: ast.Call, places: Places) -> Iterator[str]:
    """Yield the modules that a call names: `LazyModule("...")`, `import_module("...")` or `extensions.load(kind, word)`.

    A word that is not a literal can be any word of its kind.
    """
    called = ast.unparse(call.func)
    given = [each.value if isinstance(each, ast.Constant) else None for each in call.args]
    if called.rpartition(".")[2] in ("LazyModule", "import_module") and given and isinstance(given[0], str):
        yield given[0].partition(":")[0]
    elif called == "extensions.load" and len(given) == 2:
        words = places.get(str(given[0]), {})
        named = words.values() if given[1] is None else [words.get(str(given[1]), "")]
        yield from (place.partition(":")[0] for place in named)


def find_closure(start: str = START) -> set[str]:
    """Return the modules that are reached from `start`, with the packages that contain them."""
    modules = find_modules()
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name in reached or name not in modules:
            continue
        reached.add(name)
        waiting += find_imports(ast.parse(modules[name].read_text()), modules)
        if "." in name:
            waiting.append(name.rpartition(".")[0])
    return reached


def find_leaks(reached: Iterable[str]) -> list[str]:
    """Return the imports from the core to an extension, each as "importer -> imported".

    Args:
        reached: Modules whose imports are checked. Modules of extensions are left out.
    """
    modules = find_modules()
    return sorted(
        {
            f"{name} -> {imported}"
            for name in reached
            if not is_extension(name)
            for imported in find_imports(ast.parse(modules[name].read_text()), modules)
            if is_extension(imported)
        }
    )


def is_extension(module: str) -> bool:
    """Whether a module belongs to an extension."""
    return module.split(".")[1:2] != [] and module.split(".")[1] in EXTENSIONS


def count_lines(reached: Iterable[str]) -> dict[str, int]:
    """Return the lines of code of each module."""
    modules = find_modules()
    return {name: count(modules[name].read_text()) for name in reached}


def main() -> None:
    """Print the table, and the imports that lead to an extension."""
    modules, reached = find_modules(), find_closure()
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for name, number in count_lines(reached).items():
        top = modules[name].relative_to(SOURCE).parts[0]
        lines[top] += number
        files[top] += 1
    for top, number in lines.most_common():
        print(f"{number:7,}  {files[top]:4}  {top}")
    print(f"{lines.total():7,}  {files.total():4}  of {len(modules)} files are reached from {START}")
    if "--files" in sys.argv:
        print("\n".join(sorted(reached)))
    leaks = find_leaks(reached)
    print("\n".join(["extensions are reached:", *leaks]) if leaks else "no extension is reached")
    sys.exit(bool(leaks))


if __name__ == "__main__":
    main()
