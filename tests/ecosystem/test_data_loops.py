"""The rows of each rank, and the results, for many ways to load, accumulate and gather: equal with both libraries."""

import pytest

from tests.ecosystem.both import Both

pytestmark = pytest.mark.slow

LOOPS = [
    "--steps 4 --shuffle", "--num_rows 25 --steps 3", "--num_rows 33 --steps 2 --by_hand", "--drop_last --steps 2",
    "--loading split --num_rows 21 --shuffle", "--loading dispatch --steps 2", "--loading split,dispatch --num_rows 25",
    "--kind stream --steps 2", "--kind stream --num_rows 25 --drop_last", "--kind sampler --steps 2",
    "--kind batch_sampler --num_rows 25", "--shuffle --bar", "--shuffle --loading seedable,data_seed --num_rows 21",
    "--loading uneven --num_rows 24", "--no_sync_with_loader --steps 4", "--adjust --steps 4 --shuffle",
    "--precision bf16 --steps 2", "--num_rows 3",
]  # fmt: skip
TOLERANCE = 1e-6
"""Tolerance with two processes, relative to the largest number of its kind. One process must be equal bit for bit."""


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> Both:
    return Both(tmp_path_factory.mktemp("loops"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_and_numbers_are_equal(world_size, both):
    found = both.run("data_loops", *LOOPS, world_size=world_size).differences()
    assert len(found) > 10 * len(LOOPS)
    allowed = 0.0 if world_size == 1 else TOLERANCE
    assert {name: apart for name, apart in found.items() if apart > allowed} == {}
