"""Test optimizers that update matrices of other parameters, on one process."""

from functools import partial

import pytest
import torch
from torch import optim

from headway import MatrixOptimizer


def test_matrices_of_convolutions_and_batches_are_updated_like_single_parameters():
    torch.manual_seed(0)
    given = [torch.nn.Parameter(torch.randn(shape)) for shape in ((8, 3, 2, 2), (6, 5), (3, 4, 5))]
    alone = [torch.nn.Parameter(p.detach().clone()) for p in (given[0].flatten(1), given[1], *given[2])]
    views, plain = MatrixOptimizer(given, partial(optim.Muon, lr=0.1)), optim.Muon(alone, lr=0.1)
    schedules = [optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (views, plain)]
    for _ in range(3):
        for p in given:
            p.grad = torch.randn(p.shape)
        for p, grad in zip(alone, (given[0].grad.flatten(1), given[1].grad, *given[2].grad)):
            p.grad = grad.clone()
        for each in (views, plain, *schedules):
            each.step()
        views.load_state_dict(views.state_dict())
    found = [given[0].flatten(1), given[1], *given[2]]
    assert all(torch.equal(a, b) for a, b in zip(found, alone))


@pytest.mark.parametrize("view", ["flatten", "batch"])
def test_memory_order_of_a_convolution_does_not_change_its_update(view):
    weights = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(4, 3, 5, 6).to(memory_format=memory_format))
        optimizer = MatrixOptimizer([{"params": [weight], "view": view}], partial(torch.optim.Muon, lr=0.1))
        for _ in range(2):
            weight.grad = torch.randn(weight.shape).to(memory_format=memory_format)
            optimizer.step()
        assert weight.is_contiguous(memory_format=memory_format)
        weights.append(weight.detach())
    torch.testing.assert_close(weights[1], weights[0])


def test_vectors_and_unknown_views_are_errors():
    with pytest.raises(ValueError, match="fewer than two dimensions"):
        MatrixOptimizer([torch.nn.Parameter(torch.zeros(3))], optim.Muon)
    with pytest.raises(ValueError, match="empty parameter list"):
        MatrixOptimizer([], optim.Muon)
    with pytest.raises(ValueError, match="view='rows'"):
        MatrixOptimizer([{"params": [torch.nn.Parameter(torch.zeros(3, 2))], "view": "rows"}], optim.Muon)
