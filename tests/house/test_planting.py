"""Nothing is planted into an object from outside: what it works with comes in through its constructor, what changes through methods.

By the names that the parts of the training core go by: an assignment `step.x = ...` or `self._windows.x = ...` sets an attribute
of an object that this file did not make. An object's own fields are its own file's to set, and plain records
(`window.nominal`, `position.share`) are for those who compute them.
"""

import ast
from collections.abc import Iterator

from tests.house.tree_of_source import modules, parsed, shown

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
    "clock": "core/training/windows.py",
    "training_step": "core/training/step.py",
    "accumulation": "core/training/windows.py",
    "model": "core/training/prepared/model.py",
    "events": "core/data/loader.py",
    "hooks": "core/training/hooks.py",
}
"""{how an object is called where it is used: the file that may set its attributes}."""
SETTABLE = {
    ("loader", "seed"), ("loader", "even_batches"), ("accelerator", "gradient_accumulation_steps"), ("model", "loss_function"),
}  # fmt: skip
"""Properties with a setter of their own; the last one is transformers'."""
ROOMS = (
    "extras/",
    "core/training/",
    "core/data/",
    "core/strategies/",
    "core/precision/",
    "accelerator.py",
)


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement assigns to, tuples opened."""
    given: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        given = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        given = [node.target]
    while given:
        target = given.pop()
        if isinstance(target, ast.Tuple | ast.List):
            given.extend(target.elts)
        else:
            yield target


def planted(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(owner's name, attribute) of every assignment to an attribute of something that is not `self` itself."""
    for node in ast.walk(tree):
        for target in targets(node):
            if not isinstance(target, ast.Attribute):
                continue
            owner = target.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            if name.lstrip("_") in OWNERS:
                yield name.lstrip("_"), target.attr


def test_the_training_core_plants_nothing() -> None:
    found = []
    for file in modules("src"):
        name = shown(file).removeprefix("src/headway/")
        if not name.startswith(ROOMS):
            continue
        found += [
            f"{name}: {owner}.{attribute} = ..." for owner, attribute in planted(parsed(file))
            if not name.startswith(OWNERS[owner]) and (owner, attribute) not in SETTABLE
        ]  # fmt: skip
    assert not found, "\n".join(found)


def test_planting_is_seen() -> None:
    text = "self._windows.guard = 1\nstep.x, y = 1, 2\nself.meter = 3\nloader.meter += 1\nself._step.windows.piece = 0"
    assert sorted(planted(ast.parse(text))) == [
        ("loader", "meter"),
        ("step", "x"),
        ("windows", "guard"),
        ("windows", "piece"),
    ]
