"""Fixtures for the simulated CUDA device: a test fails if one of its operations cannot be computed."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def fail_on_uncomputed_values(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test if one of its operations has no implementation, unless it uses `allow_uncomputed_values`."""
    try:
        import simulated_cuda
    except ImportError:  # the tests of this folder skip themselves
        yield
        return
    before = simulated_cuda.not_computed()
    yield
    if "allow_uncomputed_values" not in request.fixturenames:
        assert simulated_cuda.not_computed() == before


@pytest.fixture
def allow_uncomputed_values() -> None:
    """Allow operations that cannot be computed in this test."""
