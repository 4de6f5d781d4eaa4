"""One tree of errors, drawn as it is."""

import ast
import inspect
import pickle
import re

from headway import errors
from tests.house.tree_of_source import ROOT, modules, nodes


def test_every_error_stands_in_the_tree_under_its_parents():
    kinds = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and kind.__name__ == name}
    drawn = dict(re.findall(r"^\s+[|`\- ]+(\w+)(?:\s+\((\w+)\))?", errors.__doc__, re.MULTILINE))
    assert set(drawn) == set(kinds)
    for name, builtin in drawn.items():
        assert issubclass(kinds[name], errors.HeadwayError) or name in ("HeadwayWarning", "Preempted")
        if builtin:
            assert builtin in {base.__name__ for base in kinds[name].__mro__}
    assert issubclass(errors.HeadwayWarning, UserWarning)
    assert issubclass(errors.Preempted, SystemExit)


def test_one_error_for_every_name_that_is_not_served():
    for kind, python in ((errors.ImportNotServed, ImportError), (errors.AttributeNotServed, AttributeError)):
        assert issubclass(kind, errors.NotServed)
        assert issubclass(kind, python)
    assert issubclass(errors.NotServed, errors.UnsupportedError)


def test_a_message_ends_with_a_link_to_its_entry():
    link = f"({errors.TROUBLESHOOTING_PAGE}#the-loss-is-nan)"
    error = errors.NonFiniteError("update 3: the loss was nan")
    assert str(error) == f"update 3: the loss was nan {link}"
    assert error.args == ("update 3: the loss was nan",)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(errors.NonFiniteError(str(error))) == str(error)  # one link, also if an error is quoted
    assert str(errors.ConfigError("no entry")) == "no entry"


def test_every_link_to_troubleshooting_leads_to_a_heading():
    page = (ROOT / errors.TROUBLESHOOTING_PAGE).read_text()
    headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
    anchors = {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).lower()) for heading in headings}
    linked = {anchor for anchor, _, _ in errors.TROUBLESHOOTING}
    assert linked - anchors == set()


def test_every_row_of_the_troubleshooting_table_fits_a_message():
    texts = [
        node.value
        for file in modules("src") if file.name != "errors.py"
        for node in nodes(file) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]  # fmt: skip
    assert [part for _, _, part in errors.TROUBLESHOOTING if not any(part in text for text in texts)] == []
