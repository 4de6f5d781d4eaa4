"""One pair of servers for the tests of a worker."""

from collections.abc import Iterator

import pytest

from tests.verify.sessions import Verifier, open_verifier


@pytest.fixture(scope="session")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verifier]:
    """A verifier whose servers live as long as the tests."""
    with open_verifier(tmp_path_factory.mktemp("verify")) as made:
        yield made
