"""Averaged weights (EMA) written by hand: put into a sharded model for an evaluation, and the trained ones back afterwards."""

import copy
from typing import Any

import pytest
import torch

from headway import Accelerator
from tests.distributed.ranks import RankFailed, run_ranks


class Shadow:
    """Copies in a list, with store, copy_to and restore, as diffusers and torch_ema have it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.shadow = [parameter.clone().detach() for parameter in model.parameters()]

    @torch.no_grad()
    def update(self) -> None:
        for average, parameter in zip(self.shadow, self.model.parameters()):
            average.sub_(0.1 * (average - parameter))

    def enter(self) -> None:
        self.stored = [parameter.detach().cpu().clone() for parameter in self.model.parameters()]
        for average, parameter in zip(self.shadow, self.model.parameters()):
            parameter.data.copy_(average.to(parameter.device).data)

    def leave(self) -> None:
        for stored, parameter in zip(self.stored, self.model.parameters()):
            parameter.data.copy_(stored.data)


class Swap:
    """The parameters themselves are kept in a list, and exchanged with the averages in place."""

    def __init__(self, model: Any) -> None:
        self.parameters = list(model.parameters())
        self.shadow = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(self.shadow, [parameter.detach() for parameter in self.parameters], 0.1)

    @torch.no_grad()
    def enter(self) -> None:
        for average, parameter in zip(self.shadow, self.parameters):
            kept = parameter.clone()
            parameter.copy_(average)
            average.copy_(kept)

    leave = enter


class States:
    """State dicts, loaded and loaded back."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.shadow = {name: value.clone() for name, value in model.state_dict().items()}

    @torch.no_grad()
    def update(self) -> None:
        for name, value in self.model.state_dict().items():
            self.shadow[name].mul_(0.9).add_(value, alpha=0.1)

    def enter(self) -> None:
        self.stored = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(self.shadow)

    def leave(self) -> None:
        self.model.load_state_dict(self.stored)


class Assigned:
    """Tensors that are assigned to `data`, which a sharded parameter does not take up."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.shadow = {name: parameter.data.clone() for name, parameter in model.named_parameters()}

    def update(self) -> None:
        for name, parameter in self.model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * parameter.data

    def enter(self) -> None:
        self.stored = {name: parameter.data for name, parameter in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            parameter.data = self.shadow[name]

    def leave(self) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.data = self.stored[name]


def built() -> torch.nn.Module:
    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), block, torch.nn.Linear(8, 2))


def run(model: Any, optimizer: Any, backward: Any, kind: Any) -> list[float]:
    """Losses of updates, each followed by two evaluations with averaged weights and one without."""
    average, told = kind(model), []
    rows = torch.arange(8.0).reshape(2, 4) / 8

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            told.append(float(model(rows).square().sum()))
        model.train()

    for number in range(3):
        loss = model(rows + number).square().mean()
        told.append(float(loss.detach()))
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        average.update()
        evaluate()
        average.enter()
        evaluate()
        evaluate()
        average.leave()
        evaluate()
    return told


def sharded(layout: dict[str, Any], kind: Any) -> list[float]:
    accelerator = Accelerator(cpu=True, **layout)
    net = built()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    return run(model, optimizer, accelerator.backward, kind)


def by_hand(kind: Any) -> list[float]:
    net = built()
    return run(net, torch.optim.SGD(net.parameters(), 0.1), torch.Tensor.backward, kind)


FSDP = {"strategy": "fsdp"}


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (FSDP, Shadow),
        pytest.param(FSDP, Swap, marks=pytest.mark.matrix),
        pytest.param(FSDP, States, marks=pytest.mark.matrix),
        *(pytest.param({}, kind, marks=pytest.mark.matrix) for kind in (Shadow, Swap, States, Assigned)),
    ],
)
def test_averages_come_and_go_as_in_one_process(layout: dict[str, Any], kind: Any) -> None:
    assert run_ranks(sharded, 2, layout, kind)[0] == pytest.approx(by_hand(kind), rel=1e-5)


@pytest.mark.matrix
def test_averages_that_are_assigned_are_refused_when_they_are_evaluated() -> None:
    with pytest.raises(RankFailed, match=r"`parameter\.data = tensor` after prepare\(\), which changes nothing"):
        run_ranks(sharded, 2, FSDP, Assigned)


def averaged_copy() -> list[float]:
    """A copy from before `prepare` takes whole weights; torch's own averaged model is made of such a copy."""
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    net = built()
    average = copy.deepcopy(net)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    told = []
    for _ in range(3):
        accelerator.backward(model(torch.ones(2, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        state = accelerator.get_state_dict(model)
        with torch.no_grad():
            for name, value in average.state_dict().items() if state else ():
                value.lerp_(state[name], 0.1)
            told.append(float(average(torch.ones(2, 4)).sum()))
    return told


@pytest.mark.matrix
def test_a_copy_from_before_prepare_can_be_averaged_into() -> None:
    found = run_ranks(averaged_copy, 2)[0]
    net = built()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    average = torch.optim.swa_utils.AveragedModel(net, avg_fn=lambda old, new, count: torch.lerp(old, new, 0.1))
    average.n_averaged += 1  # the copy counts as the first
    wanted = []
    for _ in range(3):
        net(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(net)
        with torch.no_grad():
            wanted.append(float(average(torch.ones(2, 4)).sum()))
    assert found == pytest.approx(wanted, rel=1e-5)
