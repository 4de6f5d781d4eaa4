"""Files and functions stay small, modules say what they are, and no file is a drawer for everything."""

import ast
import re
from collections import Counter

from tests.conftest import MATRICES
from tests.house.tree_of_source import ROOT, modules, nodes, parsed, project_files, shown

MAX_LINES = 500
MAX_FUNCTION = 60
FACADES = {"src/headway/accelerator.py"}
"""It only delegates: mostly docstring, one method for each public name."""
DRAWERS = {"util", "utils", "helper", "helpers", "misc", "common", "manager", "managers", "handler", "handlers"}
TEXT = {".py", ".md", ".toml", ".txt", ".sh", ".yaml", ".yml", ".json", ".cfg", ""}


def test_the_tests_look_at_the_whole_project():
    assert len(modules("src")) > 50
    assert ROOT / "README.md" in project_files()


def test_no_file_is_long():
    lengths = {shown(file): len(file.read_text().splitlines()) for file in modules()}
    too_long = {name for name, lines in lengths.items() if lines > MAX_LINES}
    assert too_long - FACADES == set()
    assert lengths.keys() >= FACADES


def length_of_body(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines after the signature, which the formatter lays out, and the docstring."""
    first = function.body[0]
    begin = (first.end_lineno or 0) + 1 if ast.get_docstring(function) is not None else first.lineno
    return (function.end_lineno or 0) - begin + 1


def test_no_function_is_long():
    found = {
        f"{shown(file)}: {node.name}": length_of_body(node)
        for file in modules("src", "scripts", "examples", "benchmarks")
        for node in nodes(file) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }  # fmt: skip
    assert {name: lines for name, lines in found.items() if lines > MAX_FUNCTION} == {}


def test_every_module_says_what_it_is():
    silent = [shown(file) for file in modules("src", "scripts", "examples", "benchmarks")
              if not ast.get_docstring(parsed(file))]  # fmt: skip
    assert silent == []


def test_first_lines_end_like_sentences():
    found = {shown(file): (ast.get_docstring(parsed(file)) or "").partition("\n")[0] for file in modules("src")}
    assert {name: line for name, line in found.items() if line[-1:] not in ".?!:" or len(line) > 130} == {}


def test_no_junk_drawers():
    found = [shown(file) for file in project_files() if DRAWERS & set(re.split(r"[_\-.]", file.name.lower()))]
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
