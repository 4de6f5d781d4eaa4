"""Each side of a comparison runs with the library that it names."""

import pytest

from tests.ecosystem.both import Both

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("world_size", [1, 2])
def test_each_side_runs_on_its_library(tmp_path, world_size):
    both = Both(tmp_path)
    sides = both.run("who", world_size=world_size)
    assert [each["is_headway"] for each in sides.accelerate] == [[0.0]] * world_size
    assert [each["is_headway"] for each in sides.headway] == [[1.0]] * world_size
    assert sides.differences() == {"ranks": 0.0, "is_headway": 1.0}
