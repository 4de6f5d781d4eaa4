"""Tests of optimizers whose `state_dict()` has its own form, like wrappers from other libraries."""

import copy
import logging

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator
from headway.errors import CheckpointError
from tests.distributed.ranks import run_ranks

STOP, UPDATES = 3, 6


class Wrapped(torch.optim.Optimizer):
    """A wrapper that stores the inner optimizer's state dict under its own key."""

    def __init__(self, inner):
        self.inner, self.count = inner, 0
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.count
        return self.inner.step(closure)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def state_dict(self):
        return {"inner": self.inner.state_dict(), "count": self.count}

    def load_state_dict(self, state):
        self.inner.load_state_dict(state["inner"])
        self.param_groups, self.count = self.inner.param_groups, state["count"]


class WithoutState(Wrapped):
    """A wrapper whose state dict has groups but no 'state', like Lookahead."""

    def state_dict(self):
        inner = self.inner.state_dict()
        return {"fast_state": inner["state"], "param_groups": inner["param_groups"], "count": self.count}

    def load_state_dict(self, state):
        self.inner.load_state_dict({"state": state["fast_state"], "param_groups": state["param_groups"]})
        self.param_groups, self.count = self.inner.param_groups, state["count"]


class Listed(Wrapped):
    """A wrapper whose state dict is a list."""

    def state_dict(self):
        return [self.inner.state_dict(), self.count]

    def load_state_dict(self, state):
        super().load_state_dict({"inner": state[0], "count": state[1]})


KINDS = {each.__name__: each for each in (Wrapped, WithoutState, Listed)}


def build_pair(kind):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "weight_decay": 0.1}]
    return model, KINDS[kind](torch.optim.Adam(groups, 0.1))


ROWS = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(1)))


def train(path, strategy, kind, resumes):
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model, optimizer, loader = accelerator.prepare(
        *build_pair(kind), DataLoader(ROWS, batch_size=4 // accelerator.num_processes)
    )
    if resumes:
        accelerator.load_state(path)
    for number, (rows,) in enumerate(loader, STOP if resumes else 0):
        accelerator.backward(model(rows).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if number + 1 == STOP:
            accelerator.save_state(path)
        if number + 1 == UPDATES:
            break
    return [each.detach().clone() for each in model.parameters()]


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        ("Wrapped", 2),
        *[pytest.param(kind, world_size, marks=pytest.mark.matrix) for kind in KINDS for world_size in (1, 2)],
    ],
)
def test_wrapper_with_its_own_state_dict_resumes_exactly(kind, world_size, tmp_path):
    whole = run_ranks(train, world_size, str(tmp_path / "x"), "ddp", kind, False)
    resumed = run_ranks(train, world_size, str(tmp_path / "x"), "ddp", kind, True)
    model, optimizer = build_pair(kind)
    for rows in ROWS.tensors[0].split(4)[:UPDATES]:
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for one, other in zip(whole, resumed, strict=True):
        for mine, theirs, expected in zip(one, other, model.parameters(), strict=True):
            assert torch.equal(mine, theirs)
            torch.testing.assert_close(mine, expected.detach())


def check_sharded_wrapper(path):
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("headway").addHandler(handler)
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    model, optimizer, loader = accelerator.prepare(*build_pair("Wrapped"), DataLoader(ROWS, batch_size=4))
    assert accelerator.process_index or any("Wrapped.state_dict() returns no 'state'" in each for each in warnings), (
        warnings
    )
    for (rows,) in loader:
        accelerator.backward(model(rows).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        break
    with pytest.raises(CheckpointError, match=r"Wrapped.state_dict\(\) has no 'state' and 'param_groups'"):
        accelerator.save_state(path)


def test_wrapper_of_a_sharded_model_is_named_at_prepare(tmp_path):
    run_ranks(check_sharded_wrapper, 2, str(tmp_path / "x"))


def test_failed_load_restores_the_wrapper(tmp_path):
    accelerator = Accelerator(cpu=True)
    model, wrapper = build_pair("Wrapped")
    model, optimizer = accelerator.prepare(model, wrapper)
    accelerator.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    accelerator.save_state(tmp_path / "x")
    optimizer.step()
    before = copy.deepcopy(wrapper.state_dict())
    wrapper.load_state_dict = fail_after(wrapper.load_state_dict)
    with pytest.raises(CheckpointError, match="could not be loaded"):
        accelerator.load_state(tmp_path / "x")
    assert wrapper.count == 2
    torch.testing.assert_close(wrapper.state_dict(), before, rtol=0, atol=0)


def fail_after(load):
    """Return a function that raises an error after it has loaded the first state, and loads later ones normally."""
    calls = []

    def call(state):
        calls.append(state)
        load(state)
        if len(calls) == 1:
            raise ValueError("state not accepted")

    return call


def test_different_order_of_parameters_is_refused(tmp_path):
    """A wrapper's own state dict refers to parameters by number."""

    def prepare(is_reversed):
        accelerator, model = Accelerator(cpu=True), build_pair("Wrapped")[0]
        parameters = list(model.parameters())
        inner = torch.optim.Adam(parameters[::-1] if is_reversed else parameters)
        accelerator.prepare(model, Wrapped(inner))
        return accelerator

    prepare(is_reversed=False).save_state(tmp_path / "x")
    with pytest.raises(CheckpointError, match="in a different order"):
        prepare(is_reversed=True).load_state(tmp_path / "x")


class Combined(torch.optim.Optimizer):
    """An optimizer that steps one inner optimizer per layer, like combinations of Muon and AdamW."""

    def __init__(self, model):
        self.optimizers = [torch.optim.Adam(layer.parameters(), 0.1) for layer in model]
        super().__init__([group for one in self.optimizers for group in one.param_groups], {})
        for one in self.optimizers:
            one.param_groups = [
                group for group in self.param_groups if group["params"][0] in set(one.param_groups[0]["params"])
            ]

    def step(self, closure=None):
        for one in self.optimizers:
            one.step(closure)

    def zero_grad(self, set_to_none=True):
        for one in self.optimizers:
            one.zero_grad(set_to_none)


def make_optimizer(kind, model):
    if kind == "Combined":
        return Combined(model)
    inner = torch.optim.Adam(model.parameters(), 0.1)
    return Wrapped(inner)


def train_sharded(kind):
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(kind, model), DataLoader(ROWS, batch_size=2))
    for number, (rows,) in enumerate(loader):
        accelerator.backward(model(rows).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if number + 1 == UPDATES:
            break
    return accelerator.get_state_dict(model)


@pytest.mark.parametrize("kind", ["Wrapped", "Combined"])
def test_inner_optimizers_keep_their_state_on_a_sharded_model(kind):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = make_optimizer(kind, model)
    for rows in ROWS.tensors[0].split(4)[:UPDATES]:
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    trained, _ = run_ranks(train_sharded, 2, kind)
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(trained[name], expected, rtol=1e-4, atol=1e-5)
