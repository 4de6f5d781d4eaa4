"""Fixtures for the tests of several libraries."""

import pytest

from tests.ecosystem.both import Both


@pytest.fixture(scope="package")
def language(tmp_path_factory):
    """Return a runner of scripts with both libraries."""
    return Both(tmp_path_factory.mktemp("language"))
