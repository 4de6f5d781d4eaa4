"""Private names of torch are used only through `_torch.py` files, which give reasons, and exist in the installed torch."""

import ast
from importlib import import_module
from pathlib import Path

import pytest
import torch

from headway.core.precision._torch import GRAD_SCALER_ATTRIBUTES
from headway.core.training._torch import DATA_LOADER_ITERATOR_ATTRIBUTES
from tests.house.tree_of_source import SOURCE, list_modules, list_nodes

TORCH_FILES = sorted(SOURCE.rglob("_torch.py"))


def import_file(file: Path):
    """Import and return the module of a source file."""
    return import_module(".".join(("headway", *file.relative_to(SOURCE).with_suffix("").parts)))


def list_lazy_names(file: Path) -> set[str]:
    """Return the dotted names that may be imported lazily in a file.

    They are the LAZY_NAMES in the `_torch.py` files of the file's package and of its parent packages.
    """
    files = [folder / "_torch.py" for folder in file.parents if folder.is_relative_to(SOURCE)]
    lists = [getattr(import_file(each), "LAZY_NAMES", ()) for each in files if each.is_file()]
    return {name.replace(":", ".") for names in lists for name in names}


def is_private(name: str) -> bool:
    """Return whether a dotted name contains a private part. Dispatcher operators (`torch.ops...`) do not count."""
    parts = name.split(".")
    # Private operators are allowed: torch gives them these names, and tests that call them notice if they change.
    is_operator = parts[:2] == ["torch", "ops"]
    return not is_operator and any(part.startswith("_") and not part.endswith("__") for part in parts)


def find_torch_names(file: Path) -> set[str]:
    """Return the dotted names of torch that a file imports, or reads from an imported module."""
    found: set[str] = set()
    aliases: dict[str, str] = {}
    for node in list_nodes(file):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.partition(".")[0] == "torch":
                    found.add(each.name)
                    aliases[each.asname or "torch"] = each.name if each.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for each in node.names:
                found.add(f"{node.module}.{each.name}")
                aliases[each.asname or each.name] = f"{node.module}.{each.name}"
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value.args:
            # placements = LazyModule("torch.distributed.tensor.placement_types")
            place = node.value.args[0]
            is_lazy = isinstance(node.value.func, ast.Name) and node.value.func.id == "LazyModule"
            if is_lazy and isinstance(place, ast.Constant) and str(place.value).partition(".")[0] == "torch":
                aliases[node.targets[0].id] = str(place.value)
    for node in list_nodes(file):
        parts: list[str] = []
        inner = node
        while isinstance(inner, ast.Attribute):
            parts.insert(0, inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in aliases:
            found.add(".".join([aliases[inner.id], *parts]))
    return found


def test_private_names_are_used_only_through_torch_files():
    wrong = []
    for file in list_modules("src"):
        name = file.relative_to(SOURCE).as_posix()
        if file.name == "_torch.py":
            continue
        lazy = list_lazy_names(file)
        for used in sorted(filter(is_private, find_torch_names(file))):
            if not any(each == used or each.startswith(f"{used}.") or used.startswith(f"{each}.") for each in lazy):
                wrong.append(f"{name}: {used}")
    assert not wrong, "use these through a _torch.py, with a reason"


@pytest.mark.parametrize("file", TORCH_FILES, ids=lambda file: file.parent.relative_to(SOURCE).as_posix())
def test_all_names_of_a_torch_file_resolve(file):
    # Importing the file has resolved its names. None would mean that torch no longer has the object.
    torch_file = import_file(file)
    names = [name for name in vars(torch_file) if not name.startswith("__")]
    assert all(getattr(torch_file, name) is not None for name in names)
    for name in getattr(torch_file, "LAZY_NAMES", ()):
        module, _, path = name.partition(":")
        found = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    for name in getattr(torch_file, "MODULE_ATTRIBUTES", ()):
        assert isinstance(getattr(torch.nn.Linear(1, 1), name), dict)


def test_grad_scaler_has_the_private_attributes_that_headway_uses():
    scaler = torch.amp.GradScaler("cpu")
    assert all(hasattr(scaler, name) for name in GRAD_SCALER_ATTRIBUTES)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loader_iterator_has_the_private_attributes_that_headway_uses(num_workers):
    iterator = iter(torch.utils.data.DataLoader(range(2), num_workers=num_workers))
    assert all(hasattr(iterator, name) for name in DATA_LOADER_ITERATOR_ATTRIBUTES)
