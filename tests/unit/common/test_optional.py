"""Errors about missing optional packages contain the install command."""

import json
import sys

import pytest

from headway.common.optional import LazyModule, is_available, require
from headway.errors import OptionalDependencyMissing


def test_an_installed_package_is_imported():
    assert is_available("json")
    assert require("json", "this needs", "json") is json


def test_what_is_missing_is_named():
    assert not is_available("no_such_package_here")
    assert not is_available("no_such_package_here.inner")
    with pytest.raises(
        OptionalDependencyMissing, match=r"charts need no_such_package_here.*pip install 'headway\[charts\]'"
    ):
        require("no_such_package_here", "charts need", "headway[charts]")
    assert issubclass(OptionalDependencyMissing, ImportError)


def test_a_module_of_later_is_imported_when_it_is_used(tmp_path, monkeypatch):
    (tmp_path / "late_one.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    late = LazyModule("late_one")
    assert "late_one" not in sys.modules
    assert late.value == 3
    with pytest.raises(AttributeError, match="nothing"):
        late.nothing
    sys.modules.pop("late_one")
