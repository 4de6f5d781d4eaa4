"""Nothing of a module's own changes: what a process has once hangs on `scope`, and one file walks up the stack."""

import ast

from tests.house.tree_of_source import modules, nodes, parsed, shown

EMPTY = {"list", "dict", "set", "deque", "defaultdict", "OrderedDict", "WeakSet", "WeakKeyDictionary", "WeakValueDictionary",
         "count", "Event", "Counter", "local"}  # fmt: skip
STACK = {"_getframe", "currentframe", "f_back", "extract_stack"}

# Rewritten beside this test; each name goes with its file's state.


def test_no_function_changes_its_module():
    found = [
        f"{shown(file)}:{node.lineno}: global {', '.join(node.names)}"
        for file in modules("src")
        for node in nodes(file) if isinstance(node, ast.Global)
    ]  # fmt: skip
    assert found == []


def test_no_module_keeps_a_registry():
    found = [
        f"{shown(file)}:{node.lineno}: {ast.unparse(node)[:70]}"
        for file in modules("src") for node in parsed(file).body
        if isinstance(node, ast.Assign | ast.AnnAssign) and _is_to_be_filled(node.value)
    ]  # fmt: skip
    assert found == []


def _is_to_be_filled(value: ast.expr | None) -> bool:
    """Something empty, which only makes sense where it is filled later; or nothing, where something is set later."""
    if isinstance(value, ast.Dict | ast.List):
        return not (value.keys if isinstance(value, ast.Dict) else value.elts)
    if isinstance(value, ast.Constant):
        return value.value is None
    if not isinstance(value, ast.Call) or value.args:
        return False
    return ast.unparse(value.func).rpartition(".")[2] in EMPTY


def test_one_file_walks_up_the_stack():
    found = {
        shown(file)
        for file in modules("src") for node in nodes(file)
        if isinstance(node, ast.Attribute) and node.attr in STACK
    }  # fmt: skip
    assert found == {"src/headway/common/callsite.py"}
