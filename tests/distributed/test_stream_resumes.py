"""Hugging Face `datasets` streams with several shards continue on other numbers of ranks and workers, twice in a row."""

from itertools import chain, zip_longest
from typing import Any

import pytest

from tests.distributed.ranks import run_ranks
from tests.distributed.stream_resume_ranks import ROWS, read_stream

GLOBAL_BATCH = 8

# kind of stream, number of shards, ranks before and after the first stop, workers before and after it
CASES = [
    ("shuffled", 8, 2, 1, 0, 0),
    *(
        pytest.param(*case, marks=pytest.mark.matrix)
        for case in [
            ("mapped", 4, 1, 2, 0, 0),
            ("plain", 4, 2, 4, 0, 0),
            ("interleaved", 4, 2, 1, 0, 0),
            ("interleaved", 4, 1, 2, 0, 0),
            ("shuffled", 8, 2, 4, 0, 0),
            ("shuffled", 1, 2, 4, 0, 0),
            ("plain", 4, 2, 1, 1, 2),
            ("plain", 4, 2, 2, 0, 2),
        ]
    ),
]


def join_rounds(ranks: list[Any]) -> list[list[int]]:
    """Return the rows of all ranks by round, in rank order."""
    return [[*chain(*batches)] for batches in zip_longest(*[rank[0] for rank in ranks], fillvalue=[])]


@pytest.mark.parametrize(("kind", "num_shards", "first", "second", "workers", "workers_then"), CASES)
def test_resumed_updates_have_the_samples_of_an_uninterrupted_run(
    kind: str, num_shards: int, first: int, second: int, workers: int, workers_then: int
) -> None:
    case = kind, num_shards, {}
    whole = run_ranks(read_stream, first, case, GLOBAL_BATCH // first, workers, None, None)
    first_part = run_ranks(read_stream, first, case, GLOBAL_BATCH // first, workers, None, 3)
    middle = run_ranks(read_stream, second, case, GLOBAL_BATCH // second, workers_then, first_part[0][1], 2)
    rest = run_ranks(read_stream, first, case, GLOBAL_BATCH // first, workers, middle[0][1], None)
    found = join_rounds(first_part) + join_rounds(middle) + join_rounds(rest)
    assert found == join_rounds(whole)
    if kind != "interleaved":  # interleaving repeats samples
        assert sorted(chain(*found)) == list(range(ROWS))
        assert sorted(row for rank in rest for batch in rank[2] for row in batch) == list(range(ROWS))  # the next epoch


def test_resume_with_another_batch_size_reads_each_sample_once() -> None:
    case = "shuffled", 5, {}
    first_part = run_ranks(read_stream, 2, case, 4, 0, None, 3)
    rest = run_ranks(read_stream, 1, case, 3, 0, first_part[0][1], None)
    assert sorted(chain(*join_rounds(first_part), *join_rounds(rest))) == list(range(ROWS))


@pytest.mark.slow
def test_registered_stream_continues_from_its_own_state_on_two_ranks() -> None:
    case = "plain", 4, {}
    first_part = run_ranks(read_stream, 1, case, 8, 0, None, 3, True)
    middle = run_ranks(read_stream, 2, case, 4, 0, first_part[0][1], 2, True)
    rest = run_ranks(read_stream, 1, case, 8, 0, middle[0][1], None, True)
    assert [*chain(*join_rounds(first_part), *join_rounds(middle), *join_rounds(rest))] == list(range(ROWS))
