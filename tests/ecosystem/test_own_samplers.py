"""A script with its own sharded sampler, loader and tracker: equal samples, losses and logs with both libraries."""

import pytest

from tests.ecosystem.both import Both

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return Both(tmp_path_factory.mktemp("own"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_losses_and_log_are_equal(both, world_size):
    sides = both.run("own_samplers", world_size=world_size)
    found = sides.differences()
    noted = {"loss", "lengths", "a", "b", "rows", "skipped", "shared", "shapes"}
    assert set(found) - {"tracked"} == noted
    assert sides.headway[0]["tracked"][:2] == [pytest.approx(0.05), 0.0]
    assert max(found.values()) <= (0.0 if world_size == 1 else 1e-6), found
