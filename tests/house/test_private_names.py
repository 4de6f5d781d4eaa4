"""Tests and benchmarks use only private attributes that the library's classes have.

Python accepts `tracker._threads = ...` also after a rename in the library, and the test then checks something else. mypy
knows the attributes of typed objects, so its report is searched for them. All other errors in the tests are ignored.
"""

import ast
import re
import subprocess
import sys

import pytest

from tests.house.tree_of_source import ROOT, list_modules, list_nodes

SETTINGS = """
[mypy]
python_version = 3.10
mypy_path = src:.
namespace_packages = True
explicit_package_bases = True
check_untyped_defs = True
ignore_missing_imports = True
[mypy-bitsandbytes.*,databricks.*,huggingface_hub.*,matplotlib.*,mlflow.*,peft.*,sqlalchemy.*,transformers.*,wandb.*]
follow_imports = skip
"""
UNKNOWN_NAME = re.compile(r'^(\S+: error: "(?:type\[)?(\w+).*?" has no attribute "_(?!_)\w+")', re.MULTILINE)
NAMES_OF_ACCELERATE = "tests/unit/compat/accelerate/"
"""Folder whose tests use the private members that `headway.compat` adds to `Accelerator`."""


def find_unknown_private_names(report: str) -> list[str]:
    """Return the lines of mypy's report that name a private attribute which a class of the library does not have."""
    classes = {
        node.name for file in list_modules("src") for node in list_nodes(file) if isinstance(node, ast.ClassDef)
    }  # fmt: skip
    return [
        match[1]
        for match in UNKNOWN_NAME.finditer(report)
        if match[2] in classes and not match[1].startswith(NAMES_OF_ACCELERATE)
    ]


@pytest.mark.slow
def test_private_names_in_tests_exist(tmp_path) -> None:
    settings = tmp_path / "mypy.ini"
    settings.write_text(SETTINGS)
    options = ["--config-file", str(settings), "--cache-dir", str(tmp_path)]
    command = [sys.executable, "-m", "mypy", *options, "tests", "benchmarks"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "checked" in ran.stdout, ran.stdout[-2000:] + ran.stderr  # not ended early by an error of syntax
    assert not find_unknown_private_names(ran.stdout)


def test_unknown_private_names_are_found() -> None:
    wrong = 'tests/x.py:83: error: "StorageTracker" has no attribute "_threads"'
    other = [
        'tests/x.py:1: error: "DataLoader[Any]" has no attribute "_feed"  [attr-defined]',
        'tests/x.py:2: error: "Net" has no attribute "weight"  [attr-defined]',
        'tests/unit/compat/accelerate/x.py:3: error: "Accelerator" has no attribute "_models"  [attr-defined]',
    ]
    assert find_unknown_private_names("\n".join([*other, wrong + "  [attr-defined]"])) == [wrong]
