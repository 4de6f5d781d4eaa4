"""Test random draws that `headway verify` makes for the global batch, however the script passes their arguments."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headway.verify.draws import BatchPlace, SharedDraws

HALVES = torch.full((2, 64), 0.5)


class SilentTrace:
    def record_call(self, *call: Any) -> None:
        pass


def draw_rows(draw: Callable[[], torch.Tensor], place: BatchPlace) -> torch.Tensor:
    with SharedDraws(True, False, lambda: place, SilentTrace()):  # type: ignore[arg-type]
        return draw()


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.bernoulli(HALVES),
        lambda: torch.bernoulli(input=HALVES),
        lambda: torch.bernoulli(torch.full((2, 64), 2.0), 0.5),
        lambda: torch.bernoulli(torch.zeros(2, 64), p=0.5),
        lambda: torch.zeros(2, 64).bernoulli_(0.5),
    ],
    ids=["input", "input by name", "p", "p by name", "in place"],
)
def test_bernoulli_draws_have_the_requested_rate_on_the_rows_of_each_rank(draw: Callable[[], torch.Tensor]) -> None:
    first, second = (draw_rows(draw, BatchPlace(2, 4, first_row, seed=7)) for first_row in (0, 2))
    for rows in (first, second):
        assert set(rows.unique().tolist()) == {0.0, 1.0}
        assert 0.3 < float(rows.mean()) < 0.7
    assert not torch.equal(first, second)
    assert torch.equal(first, draw_rows(draw, BatchPlace(2, 2, 0, seed=7)))  # the first rows of the same batch


@pytest.mark.parametrize(
    "drop",
    [
        lambda: torch.dropout(HALVES, 0.5, True),
        lambda: torch.dropout(input=HALVES, p=0.5, train=True),
        lambda: torch.alpha_dropout(HALVES, 0.5, True),
        lambda: torch.feature_dropout(HALVES, 0.5, True),
        lambda: torch.feature_alpha_dropout(HALVES, p=0.5, train=True),
        lambda: torch.nn.functional.dropout(HALVES, 0.5),
        lambda: torch.nn.functional.alpha_dropout(HALVES, 0.5, True),
        lambda: torch.nn.functional.feature_alpha_dropout(HALVES, 0.5, True),
    ],
    ids=[
        "position",
        "name",
        "alpha",
        "feature",
        "feature_alpha",
        "functional",
        "functional_alpha",
        "functional_feature_alpha",
    ],
)
def test_dropout_is_off_in_shared_draws(drop: Callable[[], torch.Tensor]) -> None:
    assert torch.equal(draw_rows(drop, BatchPlace(2, 4, 0, seed=7)), HALVES)
