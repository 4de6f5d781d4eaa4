"""Modules have a docstring, names are unique, and nothing is committed that belongs elsewhere."""

import ast
import re
from collections import Counter

from tests.conftest import MATRICES
from tests.house.tree_of_source import ROOT, modules, nodes, parsed, project_files, shown

DRAWERS = {"util", "utils", "helper", "helpers", "misc", "common", "manager", "managers", "handler", "handlers"}
TEXT = {".py", ".md", ".toml", ".txt", ".sh", ".yaml", ".yml", ".json", ".cfg", ""}


def test_the_tests_look_at_the_whole_project():
    assert len(modules("src")) > 50
    assert ROOT / "README.md" in project_files()


def test_every_module_says_what_it_is():
    silent = [shown(file) for file in modules("src", "scripts", "examples", "benchmarks")
              if not ast.get_docstring(parsed(file))]  # fmt: skip
    assert silent == []


def test_first_lines_end_like_sentences():
    found = {shown(file): (ast.get_docstring(parsed(file)) or "").partition("\n")[0] for file in modules("src")}
    assert {name: line for name, line in found.items() if line[-1:] not in ".?!:" or len(line) > 130} == {}


def test_no_junk_drawers():
    """Accelerate's module paths have its names."""
    own = [
        file for file in project_files() if not shown(file).startswith("src/headway/compat/accelerate/module_paths/")
    ]
    found = [shown(file) for file in own if DRAWERS & set(re.split(r"[_\-.]", file.name.lower()))]
    assert found == []


def test_a_class_has_a_name_of_its_own():
    names = Counter(
        node.name
        for file in modules("src")
        for node in parsed(file).body if isinstance(node, ast.ClassDef)
    )  # fmt: skip
    assert [name for name, count in names.items() if count > 1] == []


def test_the_matrices_are_there():
    """A file that has moved would slip into `make test` again."""
    assert [name for name in MATRICES if not (ROOT / "tests" / name).exists()] == []


def test_no_weights_or_checkpoints_are_committed():
    kinds = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".distcp"}
    assert [shown(file) for file in project_files() if file.suffix in kinds] == []


def test_no_path_of_a_machine():
    # Put together here, so that this file does not hold what it looks for.
    machine = [re.escape(top) + r"/\w" for top in ("/wo" + "rk", "/ho" + "me", "/ro" + "ot", "/Us" + "ers")]
    pattern = re.compile(r"(?<![\w.~\-/}])(?:" + "|".join(machine) + ")")
    found = [
        f"{shown(file)}:{number}: {line.strip()[:80]}"
        for file in project_files() if file.suffix in TEXT and file.name != "LICENSE"
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1) if pattern.search(line)
    ]  # fmt: skip
    assert found == []


def test_nothing_is_put_off():
    marks = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    found = [f"{shown(file)}:{number}" for file in modules()
             for number, line in enumerate(file.read_text().splitlines(), 1) if marks.search(line)]  # fmt: skip
    assert found == []


def test_every_skip_gives_a_reason():
    found = [
        (file, node)
        for file in modules("tests") if re.search("skip|xfail", file.read_text()) for node in nodes(file)
    ]  # fmt: skip
    reasoned = {id(node.func) for _, node in found if isinstance(node, ast.Call) and _has_reason(node)}
    bare = [
        f"{shown(file)}:{node.lineno}" for file, node in found
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
