"""Optional packages are named with their install line."""

import json

import pytest

from headway.errors import OptionalDependencyMissing
from headway.optional import available, require


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
