"""How a sequence is divided: every token once, as much causal attention for each rank, gradients that are terms."""

from itertools import chain

import pytest
import torch

from headway.layouts.context import sequences
from headway.layouts.tensor.crossings import SplitAxis


def axis(rank: int, size: int) -> SplitAxis:
    return SplitAxis(None, None, rank, size)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_token_is_on_one_rank_and_each_rank_attends_as_much(size: int) -> None:
    whole = torch.arange(4 * size)
    parts = [sequences.split_sequence(whole, axis(rank, size), 0).tolist() for rank in range(size)]
    assert sorted(chain(*parts)) == whole.tolist()
    assert len({sum(place + 1 for place in part) for part in parts}) == 1


def test_the_order_is_that_of_torchs_balancer() -> None:
    balancer = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._load_balancer")
    order = balancer._HeadTailLoadBalancer(24, 3, "cpu")._generate_indices()[0]
    mine = [sequences.split_sequence(torch.arange(24), axis(rank, 3), 0) for rank in range(3)]
    assert torch.equal(torch.cat(mine), order.long())


def test_a_length_that_does_not_divide_is_padded_at_the_end() -> None:
    ids = torch.arange(1, 11).view(2, 5)
    first, second = (sequences.split_sequence(ids, axis(rank, 2), -1, filler=-100) for rank in range(2))
    assert first.tolist() == [[1, 2, -100, -100], [6, 7, -100, -100]]
    assert second.tolist() == [[3, 4, 5, -100], [8, 9, 10, -100]]
    assert [sequences.pad_length(length, axis(0, 2)) for length in (1, 4, 5)] == [4, 4, 8]


def test_parts_stacked_by_rank_and_in_order() -> None:
    whole = torch.randn(2, 12, 3)
    stacked = torch.stack([sequences.split_sequence(whole, axis(rank, 3), 1) for rank in range(3)])
    assert torch.equal(sequences._restore_order(stacked, axis(0, 3), 1), whole)
    assert torch.equal(sequences._stack_by_rank(whole, axis(0, 3), 1), stacked)


def test_gradients_of_parts_are_terms() -> None:
    whole, grad = torch.randn(1, 6, requires_grad=True), torch.zeros(1, 6)
    for rank in range(2):
        grad += torch.autograd.grad(sequences.split_sequence(whole.exp(), axis(rank, 2), 1).sum(), whole)[0]
    assert torch.equal(grad, whole.exp())
    alike = sequences.divide_gradient(whole, axis(0, 4))
    assert torch.equal(torch.autograd.grad(alike.sum(), whole)[0], torch.full((1, 6), 0.25))
