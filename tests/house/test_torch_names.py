"""torch's private names: used only in `_torch.py` files, where each has a reason, and present in the installed torch."""

import ast
from importlib import import_module
from pathlib import Path

import pytest
import torch

from headway.core.precision._torch import GRAD_SCALER_ATTRIBUTES
from headway.core.training._torch import DATA_LOADER_ITERATOR_ATTRIBUTES
from tests.house.tree_of_source import SOURCE, modules, nodes

GATHERED = sorted(SOURCE.rglob("_torch.py"))


def module_of(file: Path):
    return import_module(".".join(("headway", *file.relative_to(SOURCE).with_suffix("").parts)))


def lazy_names_above(file: Path) -> set[str]:
    """Dotted names that the `_torch.py` files of a file's package and of the packages around it allow to import later."""
    files = [folder / "_torch.py" for folder in file.parents if folder.is_relative_to(SOURCE)]
    lists = [getattr(module_of(each), "LAZY_NAMES", ()) for each in files if each.is_file()]
    return {name.replace(":", ".") for names in lists for name in names}


def is_private(name: str) -> bool:
    parts = name.split(".")
    # Operators of the dispatcher are named as torch names them, and the tests of what uses them call them.
    is_operator = parts[:2] == ["torch", "ops"]
    return not is_operator and any(part.startswith("_") and not part.endswith("__") for part in parts)


def torch_names(file: Path) -> set[str]:
    """Dotted names of torch that a file imports or reads from an imported module."""
    found: set[str] = set()
    aliases: dict[str, str] = {}
    for node in nodes(file):
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
            # placements = Later("torch.distributed.tensor.placement_types")
            place = node.value.args[0]
            is_lazy = isinstance(node.value.func, ast.Name) and node.value.func.id == "LazyModule"
            if is_lazy and isinstance(place, ast.Constant) and str(place.value).partition(".")[0] == "torch":
                aliases[node.targets[0].id] = str(place.value)
    for node in nodes(file):
        parts: list[str] = []
        inner = node
        while isinstance(inner, ast.Attribute):
            parts.insert(0, inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in aliases:
            found.add(".".join([aliases[inner.id], *parts]))
    return found


def test_private_names_are_used_only_where_they_have_a_reason():
    wrong = []
    for file in modules("src"):
        name = file.relative_to(SOURCE).as_posix()
        if file.name == "_torch.py":
            continue
        lazy = lazy_names_above(file)
        for used in sorted(filter(is_private, torch_names(file))):
            if not any(each == used or each.startswith(f"{used}.") or used.startswith(f"{each}.") for each in lazy):
                wrong.append(f"{name}: {used}")
    assert not wrong, "use these through a _torch.py, with a reason"


@pytest.mark.parametrize("file", GATHERED, ids=lambda file: file.parent.relative_to(SOURCE).as_posix())
def test_all_names_of_a_package_resolve(file):
    # Importing the module has resolved them; a name that is None would have lost its meaning.
    gathered = module_of(file)
    names = [name for name in vars(gathered) if not name.startswith("__")]
    assert all(getattr(gathered, name) is not None for name in names)
    for name in getattr(gathered, "LAZY_NAMES", ()):
        module, _, path = name.partition(":")
        found = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    for name in getattr(gathered, "MODULE_ATTRIBUTES", ()):
        assert isinstance(getattr(torch.nn.Linear(1, 1), name), dict)


def test_a_grad_scaler_has_the_attributes_that_are_used():
    scaler = torch.amp.GradScaler("cpu")
    assert all(hasattr(scaler, name) for name in GRAD_SCALER_ATTRIBUTES)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iterator_of_a_loader_has_the_attributes_that_are_used(num_workers):
    iterator = iter(torch.utils.data.DataLoader(range(2), num_workers=num_workers))
    assert all(hasattr(iterator, name) for name in DATA_LOADER_ITERATOR_ATTRIBUTES)
