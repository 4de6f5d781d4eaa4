"""Test the URL schemes of object stores."""

from headway.common.object_path import SCHEMES
from headway.core import extensions


def test_each_scheme_has_a_store_and_each_store_has_a_scheme() -> None:
    assert set(SCHEMES) == set(extensions.list_words("store"))
