"""Rules for all files: docstrings of modules, unique class names, reasons for skips, and no unwanted files."""

import ast
import re
from collections import Counter

from tests.conftest import MATRICES
from tests.house.tree_of_source import (
    ROOT,
    get_relative_path,
    list_modules,
    list_nodes,
    list_project_files,
    parse_module,
)

MEANINGLESS_NAMES = {
    "util",
    "utils",
    "helper",
    "helpers",
    "misc",
    "common",
    "manager",
    "managers",
    "handler",
    "handlers",
}
TEXT = {".py", ".md", ".toml", ".txt", ".sh", ".yaml", ".yml", ".json", ".cfg", ""}


def test_the_checks_cover_the_whole_project():
    assert len(list_modules("src")) > 50
    assert ROOT / "README.md" in list_project_files()


def test_every_module_has_a_docstring():
    silent = [get_relative_path(file) for file in list_modules("src", "scripts", "examples", "benchmarks")
              if not ast.get_docstring(parse_module(file))]  # fmt: skip
    assert silent == []


def test_module_docstrings_start_with_a_short_sentence():
    found = {
        get_relative_path(file): (ast.get_docstring(parse_module(file)) or "").partition("\n")[0]
        for file in list_modules("src")
    }
    assert {name: line for name, line in found.items() if line[-1:] not in ".?!:" or len(line) > 130} == {}


def test_no_file_has_a_meaningless_name():
    """Check that no file has a meaningless name. Only the module paths of Accelerate are exempt."""
    own = [
        file
        for file in list_project_files()
        if not get_relative_path(file).startswith("src/headway/compat/accelerate/module_paths/")
    ]
    found = [get_relative_path(file) for file in own if MEANINGLESS_NAMES & set(re.split(r"[_\-.]", file.name.lower()))]
    assert found == []


def test_class_names_are_unique():
    names = Counter(
        node.name
        for file in list_modules("src")
        for node in parse_module(file).body if isinstance(node, ast.ClassDef)
    )  # fmt: skip
    assert [name for name, count in names.items() if count > 1] == []


def test_paths_with_the_mark_matrix_exist():
    """Check that the paths in `MATRICES` exist. A moved file would otherwise run in `make test` again."""
    assert [name for name in MATRICES if not (ROOT / "tests" / name).exists()] == []


def test_no_weights_or_checkpoints_are_committed():
    kinds = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".distcp"}
    assert [get_relative_path(file) for file in list_project_files() if file.suffix in kinds] == []


def test_no_absolute_path_of_a_machine_is_committed():
    # The patterns are concatenated, so that this file does not match them.
    machine = [re.escape(top) + r"/\w" for top in ("/wo" + "rk", "/ho" + "me", "/ro" + "ot", "/Us" + "ers")]
    pattern = re.compile(r"(?<![\w.~\-/}])(?:" + "|".join(machine) + ")")
    found = [
        f"{get_relative_path(file)}:{number}: {line.strip()[:80]}"
        for file in list_project_files() if file.suffix in TEXT and file.name != "LICENSE"
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1) if pattern.search(line)
    ]  # fmt: skip
    assert found == []


def test_source_has_no_todo_comments():
    marks = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    found = [f"{get_relative_path(file)}:{number}" for file in list_modules()
             for number, line in enumerate(file.read_text().splitlines(), 1) if marks.search(line)]  # fmt: skip
    assert found == []


def test_every_skip_gives_a_reason():
    found = [
        (file, node)
        for file in list_modules("tests") if re.search("skip|xfail", file.read_text()) for node in list_nodes(file)
    ]  # fmt: skip
    reasoned = {id(node.func) for _, node in found if isinstance(node, ast.Call) and _has_reason(node)}
    bare = [
        f"{get_relative_path(file)}:{node.lineno}" for file, node in found
        if isinstance(node, ast.Attribute) and node.attr in ("skip", "skipif", "xfail") and _is_pytest(node)
        and id(node) not in reasoned
    ]  # fmt: skip
    assert bare == []


def _is_pytest(node: ast.Attribute) -> bool:
    owner = ast.unparse(node.value)
    return owner in ("pytest", "pytest.mark", "mark")


def _has_reason(call: ast.Call) -> bool:
    named = any(keyword.arg == "reason" for keyword in call.keywords)
    return named or (isinstance(call.func, ast.Attribute) and call.func.attr == "skip" and bool(call.args))
