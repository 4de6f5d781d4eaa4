"""Imports only go to lower layers, only one file reads the environment, and code outside `strategies/` names no strategy class."""

import ast
import subprocess
import sys
from pathlib import Path

from tests.house.tree_of_source import ROOT, SOURCE, get_relative_path, list_modules, list_nodes

CONCRETE = {"SingleStrategy", "DDPStrategy"}
STRATEGY_FOLDER = ("src/headway/core/strategies/",)
ENVIRONMENT_FILES = {"src/headway/common/env.py"}


def test_imports_follow_the_layers():
    linter = Path(sys.executable).parent / "lint-imports"
    result = subprocess.run([str(linter), "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]


def test_only_one_file_reads_the_environment():
    found = set()
    for file in list_modules("src"):
        for node in list_nodes(file):
            is_attribute = isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv")
            if is_attribute and isinstance(node.value, ast.Name) and node.value.id == "os":
                found.add(get_relative_path(file))
            if (
                isinstance(node, ast.ImportFrom)
                and node.module == "os"
                and {"environ", "getenv"} & {name.name for name in node.names}
            ):
                found.add(get_relative_path(file))
    assert found == ENVIRONMENT_FILES


def test_strategy_classes_are_named_in_one_folder():
    found = {
        f"{get_relative_path(file)}: {node.id}"
        for file in list_modules("src") if not get_relative_path(file).startswith(STRATEGY_FOLDER)
        for node in list_nodes(file) if isinstance(node, ast.Name) and node.id in CONCRETE
    }  # fmt: skip
    assert found == set()


def test_no_exception_is_silently_ignored():
    found = [
        f"{get_relative_path(file)}:{node.lineno}"
        for file in list_modules("src", "scripts", "examples", "benchmarks")
        for node in list_nodes(file) if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"))
        and all(isinstance(statement, ast.Pass) for statement in node.body)
    ]  # fmt: skip
    assert found == []


def test_raised_errors_are_headways_own_classes():
    allowed = {"AttributeError", "KeyError", "IndexError", "StopIteration", "NotImplementedError", "TypeError",
               "SystemExit", "KeyboardInterrupt"}  # fmt: skip
    builtin = {"Exception", "ValueError", "RuntimeError", "OSError", "ImportError"} - allowed
    found = [
        f"{get_relative_path(file)}:{node.lineno}: {node.exc.func.id}"
        for file in list_modules("src") if file != SOURCE / "errors.py"
        for node in list_nodes(file) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        and isinstance(node.exc.func, ast.Name) and node.exc.func.id in builtin
    ]  # fmt: skip
    assert found == []
