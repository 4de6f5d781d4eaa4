"""Count the lines of code that importing the Accelerator reaches, by folder. `python scripts/core.py --files` lists the files.

The closure follows every import statement, also those inside functions and those for types, and the modules that are
named by `LazyModule("...")` or `import_module("...")`. It does not follow the registry of extensions, which is the only allowed way
from the core to an extension. The exit code is 1 if an extension is reached in another way.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.lines import SOURCE, count_lines_of_code

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
    """Return the file of every module of Headway, by the module's name."""
    modules = {}
    for file in SOURCE.rglob("*.py"):
        path = file.relative_to(SOURCE.parent).with_suffix("").parts
        modules[".".join(path[:-1] if path[-1] == "__init__" else path)] = file
    return modules


def read_registry() -> Places:
    """Return the places of all extensions, as `headway.core.extensions` lists them."""
    for node in ast.parse(REGISTRY.read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_LOCATIONS" and node.value is not None:
            places: Places = ast.literal_eval(node.value)
            return places
    raise ValueError(f"{REGISTRY} does not assign _LOCATIONS")


def find_imports(tree: ast.AST, modules: Mapping[str, object], places: Places | None = None) -> Iterator[str]:
    """Yield the modules of Headway that a file imports, anywhere in the file.

    Args:
        tree: Syntax tree of the file.
        modules: Modules of Headway by name. Other modules are left out.
        places: Registry of extensions, to also yield the modules that the file loads through it. None leaves them out.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            for name in node.names:
                submodule = f"{node.module}.{name.name}"
                yield submodule if submodule in modules else str(node.module)
        elif isinstance(node, ast.Call):
            yield from (name for name in find_named_modules(node, places or {}) if name in modules)


def find_named_modules(call: ast.Call, places: Places) -> Iterator[str]:
    """Yield the modules that a call names: `LazyModule("...")`, `import_module("...")` or `extensions.load(kind, word)`.

    If the word is not a literal, all words of its kind are possible.
    """
    function = ast.unparse(call.func)
    arguments = [argument.value if isinstance(argument, ast.Constant) else None for argument in call.args]
    if function.rpartition(".")[2] in ("LazyModule", "import_module") and arguments and isinstance(arguments[0], str):
        yield arguments[0].partition(":")[0]
    elif function == "extensions.load" and len(arguments) == 2:
        words = places.get(str(arguments[0]), {})
        loaded = words.values() if arguments[1] is None else [words.get(str(arguments[1]), "")]
        yield from (place.partition(":")[0] for place in loaded)


def find_closure(start: str = START) -> set[str]:
    """Return the modules that are reached from `start`, with the packages that contain them."""
    modules = find_modules()
    reached: set[str] = set()
    pending = [start]
    while pending:
        name = pending.pop()
        if name in reached or name not in modules:
            continue
        reached.add(name)
        pending += find_imports(ast.parse(modules[name].read_text()), modules)
        if "." in name:
            pending.append(name.rpartition(".")[0])
    return reached


def find_leaks(reached: Iterable[str]) -> list[str]:
    """Return the imports from the core to an extension, each as "importer -> imported".

    Args:
        reached: Names of the modules whose imports are checked. Modules of extensions are left out.
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
    return {name: count_lines_of_code(modules[name].read_text()) for name in reached}


def main() -> None:
    """Print the lines and files of each folder, and all imports from the core to an extension."""
    modules, reached = find_modules(), find_closure()
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for name, num_lines in count_lines(reached).items():
        top = modules[name].relative_to(SOURCE).parts[0]
        lines[top] += num_lines
        files[top] += 1
    for top, num_lines in lines.most_common():
        print(f"{num_lines:7,}  {files[top]:4}  {top}")
    print(
        f"{lines.total():7,}  {files.total():4}  in total: of {len(modules)} files, those that importing {START} reaches"
    )
    if "--files" in sys.argv:
        print("\n".join(sorted(reached)))
    leaks = find_leaks(reached)
    print("\n".join(["the core imports extensions:", *leaks]) if leaks else "the core imports no extension")
    sys.exit(bool(leaks))


if __name__ == "__main__":
    main()
