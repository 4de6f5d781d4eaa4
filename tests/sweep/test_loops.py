"""Some of the random training loops. `python -m tests.sweep.loops` runs any number of them."""

import pytest

from tests.sweep.loop_parts import draw_loop
from tests.sweep.loops import find_differences

SEEDS = range(24)
QUICK = (3, 8, 10)


@pytest.mark.parametrize("seed", [pytest.param(s, marks=[] if s in QUICK else pytest.mark.matrix) for s in SEEDS])
def test_random_loop_matches_the_loop_by_hand(seed: int) -> None:
    loop = draw_loop(seed)
    assert not find_differences(loop), loop
