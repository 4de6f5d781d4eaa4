"""What tests of several libraries share."""

import pytest

from tests.ecosystem.both import Both


@pytest.fixture(scope="package")
def language(tmp_path_factory):
    """Runs scripts on both libraries."""
    return Both(tmp_path_factory.mktemp("language"))
