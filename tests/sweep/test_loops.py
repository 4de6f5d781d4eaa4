"""Some of the random loops; `python -m tests.sweep.loops` draws any number."""

import pytest

from tests.sweep.loop_parts import drawn
from tests.sweep.loops import differences

SEEDS = range(24)
QUICK = (3, 8, 10)


@pytest.mark.parametrize("seed", [pytest.param(s, marks=[] if s in QUICK else pytest.mark.matrix) for s in SEEDS])
def test_a_random_loop_is_the_hand_written_one(seed: int) -> None:
    loop = drawn(seed)
    assert not differences(loop), loop
