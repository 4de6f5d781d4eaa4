"""Test kinds of optimizers found by a trial, on one process."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import optim

from headway.layouts.whole_updates.kinds import TrialRefused, UpdateKind, find_known_kind
from headway.layouts.whole_updates.trial import try_kind


class RowMeans(optim.SGD):
    """Divides each gradient by the means of its rows."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim > 1:
                    p.grad /= p.grad.abs().mean(1, keepdim=True)
        return super().step()


class GlobalNorm(optim.SGD):
    """Divides all gradients by their total norm."""

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


class KeepsParameters(optim.Optimizer):
    """Steps on parameters that the constructor has stored in an attribute, or in an option of its group."""

    def __init__(self, params: Any, lr: float, keeps: str = "parameters") -> None:
        super().__init__(params, {"lr": lr})
        (group,) = self.param_groups
        self.mine: Any = None
        if keeps == "IDs":
            self.mine = {id(p): lr for p in group["params"]}
        elif keeps == "option":
            group["mine"] = list(group["params"])
        elif keeps == "closure":
            mine = list(group["params"])
            self.mine = lambda: mine
        elif keeps == "alias":
            self.mine = group["params"]
        else:
            self.mine = [list(group["params"])]
        self.keeps = keeps

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        kept = {"alias": lambda: self.mine, "closure": self.mine}.get(self.keeps, lambda: self.mine[0])()
        for p in kept:
            if p.grad is not None:
                p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


class NeedsClosure(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise ValueError("a closure is needed")
        return super().step(closure)


class NeedsSize(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        assert all(p.shape[0] == 1000 for group in self.param_groups for p in group["params"])
        return super().step()


def make_parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(shape)) for shape in ((1000, 20), (30, 40), (17,), (4, 3, 2, 2))]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (RowMeans, UpdateKind.OWNED), (GlobalNorm, UpdateKind.TOGETHER), (Counting, UpdateKind.LOCAL),
        (NeedsClosure, UpdateKind.DIRECT),
    ],
)  # fmt: skip
def test_trial_finds_the_kind_and_changes_nothing(kind, expected):
    given = make_parameters()
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


def test_optimizer_that_keeps_ids_of_parameters_is_refused():
    with pytest.raises(TrialRefused, match="attribute 'known'"):
        try_kind(ById(make_parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("keeps", "told"),
    [
        ("parameters", "attribute 'mine'"), ("IDs", "attribute 'mine'"), ("option", "the option 'mine'"),
        ("closure", "changed none of the parameters"),
    ],
)  # fmt: skip
def test_optimizer_whose_constructor_keeps_parameters_is_refused(keeps, told):
    with pytest.raises(TrialRefused, match=told):
        try_kind(KeepsParameters(make_parameters(), lr=0.1, keeps=keeps))


@pytest.mark.parametrize("rate", [0.0, 1e-12, torch.tensor(0.0)])
def test_learning_rate_at_the_start_of_a_warmup_does_not_hide_the_kind(rate):
    optimizer = RowMeans(make_parameters(), lr=rate)
    assert try_kind(optimizer) is UpdateKind.OWNED
    assert optimizer.param_groups[0]["lr"] == rate


def test_optimizer_that_cannot_be_tried_is_updated_by_one_rank():
    assert try_kind(NeedsSize(make_parameters()[:1], lr=0.1)) is UpdateKind.TOGETHER


@pytest.mark.parametrize(("make", "expected"), [
    (optim.AdamW, UpdateKind.DIRECT), (optim.Adafactor, UpdateKind.OWNED), (optim.Rprop, UpdateKind.LOCAL),
    (partial(optim.SGD, fused=True), UpdateKind.LOCAL), (optim.LBFGS, UpdateKind.DIRECT),
])  # fmt: skip
def test_classes_of_torch_are_known(make, expected):
    assert find_known_kind(make(make_parameters(), lr=0.1)) is expected
