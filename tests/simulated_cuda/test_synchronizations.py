"""Waits of an update, counted from the runtime's own calls: those of docs/synchronizations.md."""

from itertools import pairwise

import pytest

from tests.synchronizations.count import NUM_FIRST
from tests.synchronizations.loops import LOOPS
from tests.synchronizations.runtime_waits import count_waits
from tests.synchronizations.test_counts import table

simulated_cuda = pytest.importorskip("simulated_cuda", reason="needs torch over the simulated runtime: make cuda")

SETTLED = {"the Trainer, labels counted, batches in pieces": 5}
"""First update that is counted, if it is a later one: that model fails by its number of rows, whatever memory is left. So the size
that is predicted from memory fails once more before pieces keep their size."""


@pytest.mark.parametrize("name", LOOPS)
def test_an_update_waits_as_often_as_the_page_says(name: str) -> None:
    looks = [0]

    def at_update() -> None:
        looks.append(count_waits(simulated_cuda.counts()))

    LOOPS[name](at_update)
    updates = [after - before for before, after in pairwise(looks)]
    assert max(updates[SETTLED.get(name, NUM_FIRST) :]) == table()[name], updates
