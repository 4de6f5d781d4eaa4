"""Test that gradients that no step uses are found."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from headway.verify.discards import DiscardWatch
from tests.unit.verify.test_blame import find_code


def make_watched() -> tuple[DiscardWatch, Any, nn.Module]:
    """Return a watch, its optimizer, and the model of the optimizer."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared = SimpleNamespace(zero_grad=optimizer.zero_grad, param_groups=optimizer.param_groups)
    watch = DiscardWatch()
    watch.watch_optimizer([prepared])
    return watch, prepared, model


@pytest.mark.parametrize(
    ("batches", "loss", "steps", "is_found"),
    [
        ((1, 2), 1.0, False, True),
        ((1, 1), 1.0, False, False),  # a second gradient of the same batch
        ((1, 2), float("nan"), False, False),  # a batch left out on purpose
        ((1, 2), 1.0, True, False),
    ],
)
def test_gradients_used_by_no_step_are_found(
    batches: tuple[int, int], loss: float, steps: bool, is_found: bool
) -> None:
    watch, optimizer, model = make_watched()
    model(torch.ones(4, 3)).mean().backward()
    assert watch.record_backward(batches[0], loss) == []
    if steps:
        watch.forget_backwards()
    optimizer.zero_grad()
    found = watch.record_backward(batches[1], 1.0)
    assert bool(found) == is_found
    assert all("optimizer.zero_grad()" in find_code(line, __file__) for line in found)


def test_several_optimizers_are_not_watched() -> None:
    _, one, model = make_watched()
    watch = DiscardWatch()
    watch.watch_optimizer([one, one])
    model(torch.ones(4, 3)).mean().backward()
    watch.record_backward(1, 1.0)
    one.zero_grad()
    assert watch.record_backward(2, 1.0) == []
