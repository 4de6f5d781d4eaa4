"""Names of Accelerate that libraries use, found in their source code, and how the `accelerate` of this process serves them.

`python -m tests.ecosystem.names_used LIBRARY...` prints {name: [how it is served, libraries]}. With `--write`, it
updates names_used.md. A library is an installed package, or `NAME==VERSION=FOLDER`. Lazy imports are found like others,
but imports by a computed name are not.
"""

import ast
import importlib.util
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import accelerate

from headway.compat.accelerate.provided_names.surface import describe_name
from headway.compat.accelerate.provided_names.tables import MODULES_AS_ACCELERATE

TESTS = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".md")
CLASS_OF_VARIABLE = {
    "accelerator": "Accelerator", "_accelerator": "Accelerator", "accelerator.state": "AcceleratorState",
    "distributed_state": "PartialState", "gradient_state": "GradientState", "parallelism_config": "ParallelismConfig",
    "fsdp_plugin": "FullyShardedDataParallelPlugin", "deepspeed_plugin": "DeepSpeedPlugin",
}  # fmt: skip
"""{name of a variable or attribute in libraries: Accelerate's class of the object}."""
_DEEPSPEED_REASON = "of DeepSpeedPlugin where ACCELERATE_USE_DEEPSPEED is set, which `headway launch` leaves out"
REASONS = {
    "Accelerator.type": "transformers keeps torch.accelerator's device in a variable of that name",
    "DeepSpeedPlugin.set_deepspeed_weakref": _DEEPSPEED_REASON,
    "DeepSpeedPlugin.set_mixed_precision": _DEEPSPEED_REASON,
    "FullyShardedDataParallelPlugin.get_module_class_from_name": "asked for with hasattr; Accelerate 1.15 has none either",
}
"""Reasons for missing names that `headway compat` does not explain."""
_HEAD = """# What libraries touch of Accelerate

Every name and member of Accelerate in these sources, how it is served under Accelerate's name, and the first test that uses it:
{libraries}.

`PYTHONPATH=$(headway compat --path) python -m tests.ecosystem.names_used LIBRARY... --write` writes this page, and `test_imports.py`
compares it with what is installed.

| touched | by | served | tested in |
|---|---|---|---|
"""


def parse_library(library: str) -> Iterator[ast.Module]:
    """Yield the syntax trees of the library's files that mention Accelerate or an accelerator."""
    name, _, folder = library.rpartition("=")
    spec = None if name else importlib.util.find_spec(folder)
    for root in [folder] if spec is None else spec.submodule_search_locations or ():
        for path in sorted(Path(root).rglob("*.py")):
            text = path.read_text()
            if "accelerat" in text:
                yield ast.parse(text)


def find_names(tree: ast.Module) -> Iterator[str]:
    """Yield names by module (`accelerate.utils.memory.clear_device_cache`) and members by class (`PartialState.device`)."""
    nodes = list(ast.walk(tree))
    bound: dict[str, str] = {}
    for node in nodes:
        is_absolute = isinstance(node, ast.ImportFrom) and not node.level
        for alias in node.names if is_absolute or isinstance(node, ast.Import) else ():
            name = f"{node.module}.{alias.name}" if is_absolute else alias.name
            if name.split(".")[0] == "accelerate":
                yield name
                bound[alias.asname or (alias.name if is_absolute else "accelerate")] = (
                    name if is_absolute or alias.asname else "accelerate"
                )
    held = dict(CLASS_OF_VARIABLE)
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            kind = _get_class(_chain(node.value.func), bound)
            held |= {".".join(_chain(target)): kind for target in node.targets if kind}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            yield from _resolve(_chain(node), bound, held)


def _chain(node: ast.AST) -> list[str]:
    """Return the parts of an expression like `a.B().c` that starts with a name, or an empty list. Calls are allowed for classes."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Call):
        made = _chain(node.func)
        return made if made and made[-1][0].isupper() else []
    front = _chain(node.value) if isinstance(node, ast.Attribute) else []
    return [*front, node.attr] if front and isinstance(node, ast.Attribute) else []


def _get_class(parts: list[str], bound: Mapping[str, str]) -> str:
    return parts[-1] if parts and parts[0] in bound and parts[-1][0].isupper() else ""


def _resolve(parts: list[str], bound: Mapping[str, str], held: Mapping[str, str]) -> Iterator[str]:
    for end in range(len(parts) - 1, 0, -1):
        front = parts[:end]
        known = [held.get(".".join(each)) for each in (front, front[-2:], front[-1:])]
        kind = next(filter(None, known), "") or _get_class(front, bound)
        if kind and front[-2:-1] != ["torch"]:
            yield f"{kind}.{parts[end]}"
            return
    module = bound.get(parts[0], "") if parts else ""
    if module.partition(".")[2] in {"", *MODULES_AS_ACCELERATE} and module:
        yield ".".join([module, *parts[1:]])


@cache
def _make_instance(kind: str) -> Any:
    """Return an instance of the class, or the class itself if it needs arguments or is an enumeration."""
    accelerate.Accelerator(cpu=True)
    found = getattr(accelerate, kind, None) or getattr(accelerate.utils, kind)
    try:
        return found()
    except (TypeError, ValueError):
        return found


def describe_serving(name: str) -> str:
    """Return `yes`, `differs: ...` or `no: ...`, with a reason that is empty if none is known."""
    place, _, last = name.rpartition(".")
    is_member = not name.startswith("accelerate")
    short = name if is_member else name.removeprefix("accelerate.")
    found = describe_name(last if describe_name(short).status == "unknown" else short)
    try:
        if is_member:
            getattr(_make_instance(place), last)
        else:
            exec(f"from {place} import {last}" if place else f"import {name}")
    except (ImportError, AttributeError):
        return f"no: {REASONS.get(name, found.note)}"
    return {"differs": f"differs: {found.note}", "not served": f"no: {found.note}"}.get(found.status, "yes")


@cache
def _read_tests() -> dict[str, str]:
    folders = ("ecosystem/habits", "ecosystem", "unit/compat", "distributed", "unit", "docs")
    own = (Path(__file__).name, "test_imports.py")
    paths = [path for each in folders for path in sorted((TESTS / each).rglob("*.py")) if path.name not in own]
    return {str(path.relative_to(TESTS)): path.read_text() for path in paths}


def find_test(name: str) -> str:
    """Return the first test file that uses a name, or a default: the test that imports all public names."""
    word = re.compile(rf"{'[.]' if name.startswith('Accelerator.') else ''}\b{re.escape(name.rpartition('.')[2])}\b")
    default = "house/test_names_of_accelerate.py" if name.startswith("accelerate") else ""
    return next((file for file, text in _read_tests().items() if word.search(text)), default)


def find_all_names(libraries: Iterable[str]) -> dict[str, tuple[str, list[str]]]:
    """Return {name: (how it is served, libraries that use it)}."""
    found: dict[str, set[str]] = defaultdict(set)
    for library in libraries:
        for tree in parse_library(library):
            for name in find_names(tree):
                found[name].add(library.partition("=")[0])
    return {name: (describe_serving(name), sorted(found[name])) for name in sorted(found)}


def main(arguments: list[str]) -> None:
    """Print the names, or write the table."""
    libraries = [each for each in arguments if not each.startswith("-")]
    found = find_all_names(libraries)
    if "--write" not in arguments:
        print(json.dumps(found))
        return
    names = [each.rpartition("=")[0].replace("==", " ") or f"{each} {version(each)}" for each in libraries]
    lines = [f"| `{name}` | {', '.join(by)} | {how} | `{find_test(name)}` |" for name, (how, by) in found.items()]
    TABLE.write_text(_HEAD.format(libraries=", ".join(names)) + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
