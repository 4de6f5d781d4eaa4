"""Test the search for a batch size by prediction, with allowed sizes that are far apart."""

import pytest

from headway.core.memory.predicted_size import PredictedSize


def search(largest: int, sizes: list[int]) -> tuple[int, list[int]]:
    """Search for the largest size up to `largest`, which each fitting size predicts. Return the result and the sizes tried."""
    found, tried = PredictedSize(sizes[-1], sizes), []
    while not found.is_done and found.size:
        tried.append(found.size)
        found.report(found.size <= largest, largest)
    return found.best_size, tried


@pytest.mark.parametrize(
    ("largest", "expected"),
    [(200, (128, [2, 4, 128])), (127, (4, [2, 4])), (3, (2, [2, 4])), (1, (0, [2]))],
)
def test_next_allowed_size_is_tried_however_large_it_is(largest: int, expected: tuple[int, list[int]]) -> None:
    assert search(largest, [2, 4, 128]) == expected


def test_growth_is_limited_if_sizes_in_between_are_allowed() -> None:
    assert search(1000, [2, 4, 8, 64, 512]) == (512, [2, 4, 64, 512])
