"""Nothing is planted into an object from outside: what it works with comes in through its constructor, what changes through methods.

By the names that the parts of the training core go by: an assignment `step.x = ...` or `self._windows.x = ...` sets an attribute
of an object that this file did not make. An object's own fields are its own file's to set, and plain records
(`window.nominal`, `position.share`) are for those who compute them.
"""

import ast
from collections.abc import Iterator

from tests.house.tree_of_source import modules, parsed, shown

OWNERS = {
    "accelerator": "accelerator.py", "step": "training/step.py", "windows": "training/windows.py",
    "prepared": "training/prepared/objects.py", "preparation": "training/prepared/prepare.py", "guard": "training/checks/finite.py",
    "meter": "training/throughput.py", "throughput": "training/throughput.py",
    "transaction": "training/replay/transaction.py",
    "snapshot": "training/replay/snapshot.py", "loader": "data/loader.py", "optimizer": "training/prepared/optimizer.py",
    "scheduler": "training/prepared/scheduler.py", "strategy": "strategies/", "precision": "precision/",
    "clock": "training/windows.py",
    "training_step": "training/step.py", "accumulation": "training/windows.py", "model": "training/prepared/model.py",
    "events": "data/loader.py", "moments": "training/hooks.py",
}  # fmt: skip
"""{how an object is called where it is used: the file that may set its attributes}."""
SETTABLE = {
    ("loader", "seed"), ("loader", "even_batches"), ("accelerator", "gradient_accumulation_steps"), ("model", "loss_function"),
}  # fmt: skip
"""Properties with a setter of their own; the last one is transformers'."""
ROOMS = ("training/", "replay/", "throughput/", "data/", "strategies/", "precision/", "resume/", "accelerator.py")


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
