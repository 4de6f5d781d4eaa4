"""Functions that report which of Accelerate's public names Headway provides, and which of them a script uses.

This module does not import torch.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import headway
from headway.compat.accelerate.provided_names.tables import (
    AS_ACCELERATE,
    DIFFERENT,
    MODULES_AS_ACCELERATE,
    NAMES,
    PROVIDED,
    REFUSED,
    RENAMED,
)

Status = Literal["served", "differs", "not served", "unknown"]


@dataclass(frozen=True)
class NameReport:
    """Description of how Headway provides one name of Accelerate.

    Attributes:
        name: Name in Accelerate. Names of Accelerator members start with "Accelerator.".
        status: "served", "differs" (provided, but with a different behavior), "not served", or "unknown" (not public in
            Accelerate 1.15).
        note: Difference from Accelerate, or alternative to a name that is not served. Empty for other names.
    """

    name: str
    status: Status
    note: str = ""


def describe_name(name: str) -> NameReport:
    """Return a description of whether and how Headway provides one name of Accelerate.

    Args:
        name: Public name, module ("utils.dataclasses") or member ("Accelerator.step").
    """
    if name in REFUSED:
        return NameReport(name, "not served", REFUSED[name])
    if name.startswith("Accelerator."):
        return NameReport(name, "served")
    if name in DIFFERENT:
        return NameReport(name, "differs", DIFFERENT[name])
    if name in AS_ACCELERATE or name in PROVIDED or name in RENAMED or name in headway.__all__:
        return NameReport(name, "served")
    if name in NAMES:
        return NameReport(name, "not served", NAMES[name])
    return NameReport(name, "served" if name in MODULES_AS_ACCELERATE else "unknown")


# -------------------------------------------------------------------- names in a script


@dataclass(frozen=True)
class NameInScript:
    """Name of Accelerate that a script uses, with the line of its first use.

    Attributes:
        name: Name without its module ("set_seed"), path of a module ("utils.memory"), or name of a member
            ("Accelerator.step").
        line: Number of the line that first uses the name.
    """

    name: str
    line: int


def list_used_names(source: str | bytes) -> list[NameInScript]:
    """Return the Accelerate names that a script imports or reads from an imported module, without duplicates.

    Members of `Accelerator` are listed only if Headway does not support them, and only for Accelerators that the script
    assigns to a variable. Keyword arguments that Headway does not support are listed with "=", such as
    "slice_fn_for_dispatch=".

    Args:
        source: Python source.

    Raises:
        SyntaxError: If the source is not valid Python.
    """
    nodes = list(ast.walk(ast.parse(source)))
    line_by_name: dict[str, int] = {}
    module_by_alias: dict[str, str] = {}  # name in the script -> module of Accelerate, "" for the package
    class_aliases: set[str] = set()  # names of the class Accelerator in the script
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for imported in _iterate_imports(node):
                if imported.module is not None:
                    module_by_alias[imported.alias] = imported.module
                if imported.name:
                    line_by_name.setdefault(imported.name, node.lineno)
                if imported.name == "Accelerator":
                    class_aliases.add(imported.alias)
    if module_by_alias or class_aliases:
        for name, line in _iterate_uses(
            nodes, module_by_alias, set(_find_accelerator_variables(nodes, class_aliases, module_by_alias))
        ):
            line_by_name.setdefault(name, line)
    return sorted(
        (NameInScript(name, line) for name, line in line_by_name.items()), key=lambda use: (use.line, use.name)
    )


def _iterate_uses(
    nodes: list[ast.AST], module_by_alias: dict[str, str], accelerators: set[str]
) -> Iterator[tuple[str, int]]:
    """Yield pairs of (name, line) for reads of Accelerate's names and for members and arguments that are not served.

    Args:
        nodes: All nodes of the script's syntax tree.
        module_by_alias: Paths of Accelerate's modules by their names in the script.
        accelerators: Names of variables that hold an Accelerator.
    """
    for node in nodes:
        if isinstance(node, ast.Attribute):
            name = _find_accelerate_name(node, module_by_alias)
            if name is not None:
                yield name, node.lineno
            member = f"Accelerator.{node.attr}"
            if member in REFUSED and _format_dotted_name(node.value) in accelerators:
                yield member, node.lineno
        elif isinstance(node, ast.Call):
            for argument in node.keywords:
                if f"{argument.arg}=" in REFUSED and not _is_none(argument.value):
                    yield f"{argument.arg}=", argument.value.lineno


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _format_dotted_name(node: ast.expr) -> str:
    """Return a dotted name such as `self.accelerator` as text, or "" for any other expression."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id])) if isinstance(node, ast.Name) else ""


class _ImportedName(NamedTuple):
    """Object of Accelerate that an import statement binds to a name.

    Attributes:
        name: Name in Accelerate, or path of a module. Empty for the package itself.
        alias: Name in the script.
        module: Path of the module inside the package, such as "utils.memory"; empty for the package itself. None if the
            object is not a module.
    """

    name: str
    alias: str
    module: str | None


def _iterate_imports(node: ast.Import | ast.ImportFrom) -> Iterator[_ImportedName]:
    """Yield the objects of Accelerate that a statement imports.

    For a `from` import, also yield a module from which objects are imported, if Headway does not provide this module.
    """
    if isinstance(node, ast.Import):
        for each in node.names:
            package, _, path = each.name.partition(".")
            if package == "accelerate":
                # `import accelerate.utils` binds the package, and `import accelerate.utils as u` the module.
                yield _ImportedName(path, each.asname or package, path if each.asname else "")
        return
    package, _, parent = (node.module or "").partition(".")
    if node.level or package != "accelerate":
        return
    if parent and parent not in MODULES_AS_ACCELERATE:
        yield _ImportedName(parent, parent, None)
    for each in node.names:
        if each.name == "*":
            continue
        path = f"{parent}.{each.name}".lstrip(".")
        alias = each.asname or each.name
        # There is a module `utils.tqdm`, but `from accelerate.utils import tqdm` imports the function.
        if path in MODULES_AS_ACCELERATE and path != "utils.tqdm":
            yield _ImportedName(path, alias, path)
        else:
            yield _ImportedName(each.name, alias, None)


def _find_accelerate_name(node: ast.Attribute, module_by_alias: dict[str, str]) -> str | None:
    """Return the name of Accelerate that an expression reads, such as "gather" for `accelerate.utils.gather`.

    None if the attribute is a module or does not belong to a module of Accelerate.

    Args:
        node: Expression that reads an attribute.
        module_by_alias: Paths of Accelerate's modules by their names in the script.
    """
    alias, *parts = _format_dotted_name(node).split(".")
    if alias not in module_by_alias:
        return None
    path = module_by_alias[alias]
    for index, part in enumerate(parts):
        submodule = f"{path}.{part}".lstrip(".")
        if submodule not in MODULES_AS_ACCELERATE:
            is_end = index == len(parts) - 1
            return part if is_end and not part.startswith("__") else None
        path = submodule
    return None


def _find_accelerator_variables(
    nodes: list[ast.AST], class_aliases: set[str], module_by_alias: dict[str, str]
) -> Iterator[str]:
    """Yield the names of variables and attributes to which the script assigns a new Accelerator.

    Args:
        nodes: All nodes of the script's syntax tree.
        class_aliases: Names of the class `Accelerator` in the script.
        module_by_alias: Paths of Accelerate's modules by their names in the script.
    """
    for node in nodes:
        value = getattr(node, "value", None)
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(value, ast.Call):
            continue
        callee = value.func
        is_named = isinstance(callee, ast.Name) and callee.id in class_aliases
        if is_named or (
            isinstance(callee, ast.Attribute) and _find_accelerate_name(callee, module_by_alias) == "Accelerator"
        ):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if name := _format_dotted_name(target):
                    yield name
