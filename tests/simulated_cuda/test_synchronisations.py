"""Waits of an update, counted from the runtime's own calls: those of docs/synchronisations.md."""

from itertools import pairwise

import pytest

from tests.synchronisations.count import NUM_FIRST
from tests.synchronisations.loops import LOOPS
from tests.synchronisations.test_counts import table

simulated_cuda = pytest.importorskip("simulated_cuda", reason="needs torch over the simulated runtime: make cuda")

WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaMalloc",
    "cudaFree",
)


@pytest.mark.parametrize("name", LOOPS)
def test_an_update_waits_as_often_as_the_page_says(name: str) -> None:
    looks = [0]

    def at_update() -> None:
        counts = simulated_cuda.counts()
        looks.append(sum(counts.get(wait, 0) for wait in WAITS))

    LOOPS[name](at_update)
    updates = [after - before for before, after in pairwise(looks)]
    assert max(updates[NUM_FIRST:]) == table()[name], updates
