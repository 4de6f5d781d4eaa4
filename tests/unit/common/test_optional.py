"""Optional packages are named with their install line."""

import json
import sys

import pytest

from headway.common.optional import Later, available, require
from headway.errors import OptionalDependencyMissing


def test_what_is_there_is_imported():
    assert available("json")
    assert require("json", "this needs", "json") is json


def test_what_is_missing_is_named():
    assert not available("no_such_package_here")
    assert not available("no_such_package_here.inner")
    with pytest.raises(
        OptionalDependencyMissing, match=r"charts need no_such_package_here.*pip install 'headway\[charts\]'"
    ):
        require("no_such_package_here", "charts need", "headway[charts]")
    assert issubclass(OptionalDependencyMissing, ImportError)


def test_a_module_of_later_is_imported_when_it_is_used(tmp_path, monkeypatch):
    (tmp_path / "late_one.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    late = Later("late_one")
    assert "late_one" not in sys.modules
    assert late.value == 3
    with pytest.raises(AttributeError, match="nothing"):
        late.nothing
    sys.modules.pop("late_one")
