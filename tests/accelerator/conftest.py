"""Builds the toy accelerator once, before the first test that needs it."""

import pytest

from tests.accelerator.toy import build


@pytest.fixture(autouse=True, scope="session")
def built() -> None:
    """Its own time limit: a compiler on a busy machine takes longer than a test may."""
    if build.missing() is None:
        build.build()
