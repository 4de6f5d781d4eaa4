"""Kinds of optimizers found by a trial, owners and buckets, and matrices of other parameters, on one process."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import optim

from headway import MatrixOptimizer
from headway.layouts.whole_updates.kinds import TrialRefused, UpdateKind, find_known_kind, try_kind
from headway.layouts.whole_updates.ownership import assign_buckets, assign_owners


class RowMeans(optim.SGD):
    """Divides each gradient by the means over its rows."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim > 1:
                    p.grad /= p.grad.abs().mean(1, keepdim=True)
        return super().step()


class GlobalNorm(optim.SGD):
    """Divides all gradients by the norm of all of them."""

    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.nn.utils.get_total_norm(grads)
        for grad in grads:
            grad /= norm
        return super().step()


class Counting(optim.SGD):
    """Counts its steps in the group, and divides the rate by the count."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 0.1 / group["count"]
        return super().step()


class ById(optim.SGD):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.known = {id(p): 0 for group in self.param_groups for p in group["params"]}

    def step(self, closure: Any = None) -> Any:
        self.known.update({id(p): 1 for group in self.param_groups for p in group["params"]})
        return super().step()


class NeedsClosure(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise ValueError("a closure is needed")
        return super().step(closure)


class NeedsSize(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        assert all(p.shape[0] == 1000 for group in self.param_groups for p in group["params"])
        return super().step()


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(shape)) for shape in ((1000, 20), (30, 40), (17,), (4, 3, 2, 2))]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (RowMeans, UpdateKind.OWNED), (GlobalNorm, UpdateKind.TOGETHER), (Counting, UpdateKind.LOCAL),
        (NeedsClosure, UpdateKind.DIRECT),
    ],
)  # fmt: skip
def test_a_trial_finds_the_kind_and_changes_nothing(kind, expected):
    given = parameters()
    before, state = [p.detach().clone() for p in given], torch.get_rng_state()
    optimizer = kind(given, lr=0.1, momentum=0.9)
    options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    assert find_known_kind(optimizer) is None
    assert try_kind(optimizer) is expected
    assert all(torch.equal(a, b) for a, b in zip(given, before))
    assert torch.equal(torch.get_rng_state(), state)
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"] == given
    assert {name: value for name, value in optimizer.param_groups[0].items() if name != "params"} == options


def test_what_keeps_ids_of_parameters_is_refused():
    with pytest.raises(TrialRefused, match="attribute 'known'"):
        try_kind(ById(parameters(), lr=0.1))


def test_what_cannot_be_tried_is_updated_by_one_rank():
    assert try_kind(NeedsSize(parameters()[:1], lr=0.1)) is UpdateKind.TOGETHER


@pytest.mark.parametrize(("make", "expected"), [
    (optim.AdamW, UpdateKind.DIRECT), (optim.Adafactor, UpdateKind.OWNED), (optim.Rprop, UpdateKind.LOCAL),
    (partial(optim.SGD, fused=True), UpdateKind.LOCAL), (optim.LBFGS, UpdateKind.DIRECT),
])  # fmt: skip
def test_classes_of_torch_are_known(make, expected):
    assert find_known_kind(make(parameters(), lr=0.1)) is expected


def test_owners_share_the_work_and_keep_what_they_have():
    shapes = [(64, 64)] * 6 + [(64,)] * 3
    owners = assign_owners(shapes, 3)
    assert [owners.count(rank) for rank in range(3)] == [3, 3, 3]
    assert assign_owners([*shapes, (8, 8)], 3, owners)[:9] == owners
    assert assign_owners(shapes, 1) == [0] * 9


def test_buckets_hold_each_parameter_once_and_no_owner_gathers_more_than_the_limit():
    given = [torch.empty(size, size) for size in (8, 16, 4, 16, 2, 8)]
    owners = assign_owners([p.shape for p in given], 2)
    buckets = assign_buckets(given, owners, 1000)
    assert sorted(n for bucket in buckets for n in bucket) == list(range(6))
    for bucket in buckets:
        for rank in range(2):
            own = [given[n].numel() * 4 for n in bucket if owners[n] == rank]
            assert sum(own) <= 1000 or len(own) == 1


def test_matrices_of_convolutions_and_batches_are_updated_as_if_each_were_a_parameter():
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


def test_vectors_and_unknown_views_are_errors():
    with pytest.raises(ValueError, match="fewer than two dimensions"):
        MatrixOptimizer([torch.nn.Parameter(torch.zeros(3))], optim.Muon)
    with pytest.raises(ValueError, match="view='rows'"):
        MatrixOptimizer([{"params": [torch.nn.Parameter(torch.zeros(3, 2))], "view": "rows"}], optim.Muon)
