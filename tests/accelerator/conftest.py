"""Fixture that builds the toy accelerator once, before the first test of this folder."""

import pytest

from tests.accelerator.toy import build


@pytest.fixture(autouse=True, scope="session")
def build_toy_accelerator() -> None:
    """Build the toy accelerator if a compiler is available.

    This fixture is separate because compiling on a busy machine can take longer than one test's time limit.
    """
    if build.find_missing_tool() is None:
        build.build()
