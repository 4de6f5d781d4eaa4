"""How each public name of Accelerate is served, and which of them a script uses, by its source. Nothing here imports torch."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import headway
from headway.compat.accelerate.served.names import (
    AS_ACCELERATE,
    DIFFERENT,
    MODULES_AS_ACCELERATE,
    NAMES,
    REFUSED,
    RENAMED,
    SERVED,
)

Status = Literal["served", "differs", "not served", "unknown"]


@dataclass(frozen=True)
class Answer:
    """How one name is served.

    Attributes:
        name: Accelerate's; with "Accelerator." before a member of it.
        status: "served", "differs", "not served", or "unknown": not a public name of Accelerate 1.15.
        note: the difference, or what to use instead; empty if it is served as in Accelerate.
    """

    name: str
    status: Status
    note: str = ""


def answer(name: str) -> Answer:
    """How `name`, a public name, a module ("utils.dataclasses") or a member ("Accelerator.step"), is served."""
    if name in REFUSED:
        return Answer(name, "not served", REFUSED[name])
    if name.startswith("Accelerator."):
        return Answer(name, "served")
    if name in DIFFERENT:
        return Answer(name, "differs", DIFFERENT[name])
    if name in AS_ACCELERATE or name in SERVED or name in RENAMED or name in headway.__all__:
        return Answer(name, "served")
    if name in NAMES:
        return Answer(name, "not served", NAMES[name])
    return Answer(name, "served" if name in MODULES_AS_ACCELERATE else "unknown")


# -------------------------------------------------------------------- names in a script


@dataclass(frozen=True)
class NameInScript:
    """One of Accelerate's names in a script.

    Attributes:
        name: without `accelerate.` and its modules; a module by its path, and a member as "Accelerator.step".
        line: where it stands first.
    """

    name: str
    line: int


def uses(source: str | bytes) -> list[NameInScript]:
    """Every name of Accelerate that a source imports, or reads from an imported module, each once.

    Members of the Accelerator are listed where they are refused and the object was made under a name of the script:
    `accelerator = Accelerator(...)`; and arguments, as "slice_fn_for_dispatch=", where no call takes them.

    Args:
        source: Python.

    Raises:
        SyntaxError: it is not.
    """
    nodes = list(ast.walk(ast.parse(source)))
    found: dict[str, int] = {}
    modules: dict[str, str] = {}  # name in the script -> module of Accelerate, "" for the package
    kinds: set[str] = set()  # what the script calls the class
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name, bound, module in _imported(node):
                if module is not None:
                    modules[bound] = module
                if name:
                    found.setdefault(name, node.lineno)
                    if name == "Accelerator":
                        kinds.add(bound)
    if modules or kinds:
        for name, line in _read_names(nodes, modules, set(_objects(nodes, kinds, modules))):
            found.setdefault(name, line)
    return sorted((NameInScript(name, line) for name, line in found.items()), key=lambda use: (use.line, use.name))


def _read_names(nodes: list[ast.AST], modules: dict[str, str], objects: set[str]) -> Iterator[tuple[str, int]]:
    for node in nodes:
        if isinstance(node, ast.Attribute):
            read = _read(node, modules)
            if read is not None:
                yield read, node.lineno
            member = f"Accelerator.{node.attr}"
            if member in REFUSED and _dotted(node.value) in objects:
                yield member, node.lineno
        elif isinstance(node, ast.Call):
            for argument in node.keywords:
                if f"{argument.arg}=" in REFUSED and not _is_none(argument.value):
                    yield f"{argument.arg}=", argument.value.lineno


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _dotted(node: ast.expr) -> str:
    """`self.accelerator` as text; empty for anything but names and attributes."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id])) if isinstance(node, ast.Name) else ""


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str, str | None]]:
    """Of each imported thing: the name used ("" for the package), what the script calls it, and the module that it is, if any."""
    if isinstance(node, ast.Import):
        for each in node.names:
            package, _, module = each.name.partition(".")
            if package == "accelerate":
                yield module, each.asname or package, module if each.asname else ""
        return
    package, _, module = (node.module or "").partition(".")
    if node.level or package != "accelerate":
        return
    if module and module not in MODULES_AS_ACCELERATE:
        yield module, module, None
    for each in node.names:
        inner = f"{module}.{each.name}".lstrip(".")
        # `utils.tqdm` is a module and, as a name, the function.
        is_module = inner in MODULES_AS_ACCELERATE and inner != "utils.tqdm"
        if each.name != "*":
            yield inner if is_module else each.name, each.asname or each.name, inner if is_module else None


def _read(node: ast.Attribute, modules: dict[str, str]) -> str | None:
    """What `accelerate.utils.gather` reads; None where the attribute is not read from a module of Accelerate, or is a module."""
    first, *parts = _dotted(node).split(".")
    if first not in modules:
        return None
    path = modules[first]
    for index, part in enumerate(parts):
        longer = f"{path}.{part}".lstrip(".")
        if longer not in MODULES_AS_ACCELERATE:
            is_end = index == len(parts) - 1
            return part if is_end and not part.startswith("__") else None
        path = longer
    return None


def _objects(nodes: list[ast.AST], kinds: set[str], modules: dict[str, str]) -> Iterator[str]:
    for node in nodes:
        value = getattr(node, "value", None)
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(value, ast.Call):
            continue
        made = value.func
        is_named = isinstance(made, ast.Name) and made.id in kinds
        if is_named or (isinstance(made, ast.Attribute) and _read(made, modules) == "Accelerator"):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if name := _dotted(target):
                    yield name
