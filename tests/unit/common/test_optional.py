"""Test errors about missing optional packages, which contain the install command, and lazy imports."""

import json
import sys

import pytest

from headway.common.optional import LazyModule, is_available, require
from headway.errors import OptionalDependencyMissing


def test_installed_package_is_imported():
    assert is_available("json")
    assert require("json", "this needs", "json") is json


def test_missing_package_is_named_with_the_install_command():
    assert not is_available("no_such_package_here")
    assert not is_available("no_such_package_here.inner")
    with pytest.raises(
        OptionalDependencyMissing, match=r"charts need no_such_package_here.*pip install 'headway\[charts\]'"
    ):
        require("no_such_package_here", "charts need", "headway[charts]")
    assert issubclass(OptionalDependencyMissing, ImportError)


def test_lazy_module_is_imported_at_first_use(tmp_path, monkeypatch):
    (tmp_path / "late_one.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    late = LazyModule("late_one")
    assert "late_one" not in sys.modules
    assert late.value == 3
    with pytest.raises(AttributeError, match="nothing"):
        late.nothing
    sys.modules.pop("late_one")
