"""Modules hold no mutable state: per-process objects are stored through `scope`, and only one file inspects the stack."""

import ast

from tests.house.tree_of_source import get_relative_path, list_modules, list_nodes, parse_module

CONTAINERS = {"list", "dict", "set", "deque", "defaultdict", "OrderedDict", "WeakSet", "WeakKeyDictionary", "WeakValueDictionary",
              "count", "Event", "Counter", "local"}  # fmt: skip
STACK_FUNCTIONS = {"_getframe", "currentframe", "f_back", "extract_stack"}


def test_no_function_changes_its_module():
    found = [
        f"{get_relative_path(file)}:{node.lineno}: global {', '.join(node.names)}"
        for file in list_modules("src")
        for node in list_nodes(file) if isinstance(node, ast.Global)
    ]  # fmt: skip
    assert found == []


def test_no_module_holds_an_empty_container_or_none():
    found = [
        f"{get_relative_path(file)}:{node.lineno}: {ast.unparse(node)[:70]}"
        for file in list_modules("src") for node in parse_module(file).body
        if isinstance(node, ast.Assign | ast.AnnAssign) and _is_placeholder(node.value)
    ]  # fmt: skip
    assert found == []


def _is_placeholder(value: ast.expr | None) -> bool:
    """Return whether a module-level value is an empty container or None, which suggests that it is filled or set later."""
    if isinstance(value, ast.Dict | ast.List):
        return not (value.keys if isinstance(value, ast.Dict) else value.elts)
    if isinstance(value, ast.Constant):
        return value.value is None
    if not isinstance(value, ast.Call) or value.args:
        return False
    return ast.unparse(value.func).rpartition(".")[2] in CONTAINERS


def test_only_one_file_inspects_the_stack():
    found = {
        get_relative_path(file)
        for file in list_modules("src") for node in list_nodes(file)
        if isinstance(node, ast.Attribute) and node.attr in STACK_FUNCTIONS
    }  # fmt: skip
    assert found == {"src/headway/common/callsite.py"}
