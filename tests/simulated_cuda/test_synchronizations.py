"""Waits per update, counted from calls of the simulated runtime, match docs/synchronizations.md."""

from itertools import pairwise

import pytest

from tests.synchronizations.count import NUM_FIRST
from tests.synchronizations.loops import LOOPS
from tests.synchronizations.runtime_waits import count_waits
from tests.synchronizations.test_counts import read_table

simulated_cuda = pytest.importorskip("simulated_cuda", reason="needs torch over the simulated runtime: make cuda")

FIRST_COUNTED = {"the Trainer, labels counted, batches in pieces": 5}
"""{loop: first update that is counted}, for loops that settle later than others. This loop's model fails by its number of rows,
not by its memory. The size predicted from memory therefore fails once more before the size of the pieces stays the same."""


@pytest.mark.parametrize("name", LOOPS)
def test_waits_per_update_match_the_page(name: str) -> None:
    totals = [0]

    def at_update() -> None:
        totals.append(count_waits(simulated_cuda.counts()))

    LOOPS[name](at_update)
    updates = [after - before for before, after in pairwise(totals)]
    assert max(updates[FIRST_COUNTED.get(name, NUM_FIRST) :]) == read_table()[name], updates
