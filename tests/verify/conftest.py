"""Share one pair of servers between the tests of `headway verify`."""

from collections.abc import Iterator

import pytest

from tests.verify.sessions import Verifier, open_verifier


@pytest.fixture(scope="session")
def shared_verifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verifier]:
    """Yield a verifier whose servers run until the end of the test session."""
    with open_verifier(tmp_path_factory.mktemp("verify")) as verifier:
        yield verifier


@pytest.fixture
def verifier(shared_verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> Verifier:
    """Return the shared verifier. Its folder is the current one until the test ends."""
    monkeypatch.chdir(shared_verifier.folder)
    return shared_verifier
