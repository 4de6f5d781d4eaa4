"""No file of the training core sets attributes of objects that belong to another file.

Objects receive what they need through their constructors, and change through their methods. The check goes by variable
names: in `step.x = ...` or `self._windows.x = ...`, the owner's name must belong to the file that makes the assignment.
Plain records (`window.nominal_weight`, `position.share`) are exempt: the code that computes their values may set them.
"""

import ast
from collections.abc import Iterator

from tests.house.tree_of_source import get_relative_path, list_modules, parse_module

OWNERS = {
    "accelerator": "accelerator.py",
    "step": "core/training/step.py",
    "windows": "core/training/windows.py",
    "prepared": "core/training/prepared/objects.py",
    "preparation": "core/training/prepared/prepare.py",
    "guard": "core/training/checks/finite.py",
    "meter": "extras/throughput.py",
    "throughput": "extras/throughput.py",
    "transaction": "extras/replay/transaction.py",
    "snapshot": "extras/replay/snapshot.py",
    "loader": "core/data/loader.py",
    "optimizer": "core/training/prepared/optimizer.py",
    "scheduler": "core/training/prepared/scheduler.py",
    "strategy": "core/strategies/",
    "precision": "core/precision/",
    "clock": "core/training/update_clock.py",
    "training_step": "core/training/step.py",
    "accumulation": "core/training/windows.py",
    "model": "core/training/prepared/model.py",
    "events": "core/data/loader.py",
    "hooks": "core/training/hooks.py",
}
"""{variable name of an object: file or folder that may set its attributes}."""
ALLOWED = {
    ("loader", "seed"), ("loader", "even_batches"), ("accelerator", "gradient_accumulation_steps"), ("model", "loss_function"),
}  # fmt: skip
"""Properties with a setter, which any file may assign. The last one belongs to transformers."""
CHECKED_PATHS = (
    "extras/",
    "core/training/",
    "core/data/",
    "core/strategies/",
    "core/precision/",
    "accelerator.py",
)


def find_targets(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that a statement assigns to, with tuples and lists unpacked."""
    pending: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        pending = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        pending = [node.target]
    while pending:
        target = pending.pop()
        if isinstance(target, ast.Tuple | ast.List):
            pending.extend(target.elts)
        else:
            yield target


def find_foreign_assignments(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (owner's name, attribute) for every assignment to an attribute of an object in `OWNERS`."""
    for node in ast.walk(tree):
        for target in find_targets(node):
            if not isinstance(target, ast.Attribute):
                continue
            owner = target.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            if name.lstrip("_") in OWNERS:
                yield name.lstrip("_"), target.attr


def test_the_training_core_sets_no_foreign_attributes() -> None:
    found = []
    for file in list_modules("src"):
        name = get_relative_path(file).removeprefix("src/headway/")
        if not name.startswith(CHECKED_PATHS):
            continue
        found += [
            f"{name}: {owner}.{attribute} = ..." for owner, attribute in find_foreign_assignments(parse_module(file))
            if not name.startswith(OWNERS[owner]) and (owner, attribute) not in ALLOWED
        ]  # fmt: skip
    assert not found, "\n".join(found)


def test_foreign_assignments_are_found() -> None:
    text = "self._windows.guard = 1\nstep.x, y = 1, 2\nself.meter = 3\nloader.meter += 1\nself._step.windows.piece = 0"
    assert sorted(find_foreign_assignments(ast.parse(text))) == [
        ("loader", "meter"),
        ("step", "x"),
        ("windows", "guard"),
        ("windows", "piece"),
    ]
