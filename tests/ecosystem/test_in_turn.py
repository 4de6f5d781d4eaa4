"""Several models in alternating blocks under Accelerate's name: they share one counter, and loss.backward() is accepted."""

import pytest

from tests.ecosystem.both import Both

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return Both(tmp_path_factory.mktemp("in_turn"))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("steps", "style"), [(1, "own"), (2, "own"), (1, "raw"), (2, "raw")])
def test_losses_and_weights_are_equal(both, steps, style, world_size):
    found = both.run("in_turn", str(steps), style, world_size=world_size).differences()
    assert set(found) == {"d", "g", "sync", "weights"}
    assert max(found.values()) <= (0.0 if world_size == 1 else 1e-6), found
