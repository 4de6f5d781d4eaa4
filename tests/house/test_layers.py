"""Imports only look down, the environment has one door, and no strategy is asked for by its class."""

import ast
import subprocess
import sys
from pathlib import Path

from tests.house.tree_of_source import ROOT, SOURCE, modules, nodes, shown

CONCRETE = {"SingleStrategy", "DDPStrategy"}
ENGINE_ROOM = ("src/headway/core/strategies/",)
# The launcher's agent is a process of its own and hands its environment on.
ENVIRONMENT_DOORS = {"src/headway/common/env.py"}


def test_layers_hold():
    linter = Path(sys.executable).parent / "lint-imports"
    ran = subprocess.run([str(linter), "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]


def test_one_file_touches_the_environment():
    found = set()
    for file in modules("src"):
        for node in nodes(file):
            is_attribute = isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv")
            if is_attribute and isinstance(node.value, ast.Name) and node.value.id == "os":
                found.add(shown(file))
            if (
                isinstance(node, ast.ImportFrom)
                and node.module == "os"
                and {"environ", "getenv"} & {name.name for name in node.names}
            ):
                found.add(shown(file))
    assert found == ENVIRONMENT_DOORS


def test_strategies_are_named_in_one_folder():
    found = {
        f"{shown(file)}: {node.id}"
        for file in modules("src") if not shown(file).startswith(ENGINE_ROOM)
        for node in nodes(file) if isinstance(node, ast.Name) and node.id in CONCRETE
    }  # fmt: skip
    assert found == set()


def test_nothing_is_swallowed():
    found = [
        f"{shown(file)}:{node.lineno}"
        for file in modules("src", "scripts", "examples", "benchmarks")
        for node in nodes(file) if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"))
        and all(isinstance(statement, ast.Pass) for statement in node.body)
    ]  # fmt: skip
    assert found == []


def test_errors_come_from_one_tree():
    allowed = {"AttributeError", "KeyError", "IndexError", "StopIteration", "NotImplementedError", "TypeError",
               "SystemExit", "KeyboardInterrupt"}  # fmt: skip
    builtin = {"Exception", "ValueError", "RuntimeError", "OSError", "ImportError"} - allowed
    found = [
        f"{shown(file)}:{node.lineno}: {node.exc.func.id}"
        for file in modules("src") if file != SOURCE / "errors.py"
        for node in nodes(file) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        and isinstance(node.exc.func, ast.Name) and node.exc.func.id in builtin
    ]  # fmt: skip
    assert found == []
