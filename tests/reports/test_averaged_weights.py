"""Tests of handwritten EMA weights: copied into a sharded model for evaluation, and replaced by the trained weights afterwards."""

import copy
from typing import Any

import pytest
import torch

from headway import Accelerator
from tests.distributed.ranks import RankFailed, run_ranks


class CopiedAverages:
    """Averages in a list, which are copied into the parameters while a CPU copy stores them, as in diffusers and torch_ema."""

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


class SwappedAverages:
    """Averages in a list that are exchanged with the parameters in place."""

    def __init__(self, model: Any) -> None:
        self.parameters = list(model.parameters())
        self.shadow = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(self.shadow, [parameter.detach() for parameter in self.parameters], 0.1)

    @torch.no_grad()
    def enter(self) -> None:
        for average, parameter in zip(self.shadow, self.parameters):
            trained = parameter.clone()
            parameter.copy_(average)
            average.copy_(trained)

    leave = enter


class StateDictAverages:
    """Averages as a state dict. Loading it replaces the weights, loading the stored one restores them."""

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


class AssignedAverages:
    """Averages that are assigned to `parameter.data`. Sharded parameters ignore such an assignment."""

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


def build_model() -> torch.nn.Module:
    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), block, torch.nn.Linear(8, 2))


def run(model: Any, optimizer: Any, backward: Any, kind: Any) -> list[float]:
    """Return losses and outputs of three updates. Each update is evaluated with trained, twice averaged, and trained weights."""
    average, values = kind(model), []
    rows = torch.arange(8.0).reshape(2, 4) / 8

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            values.append(float(model(rows).square().sum()))
        model.train()

    for number in range(3):
        loss = model(rows + number).square().mean()
        values.append(float(loss.detach()))
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
    return values


def train_prepared(layout: dict[str, Any], kind: Any) -> list[float]:
    accelerator = Accelerator(cpu=True, **layout)
    net = build_model()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    return run(model, optimizer, accelerator.backward, kind)


def train_by_hand(kind: Any) -> list[float]:
    net = build_model()
    return run(net, torch.optim.SGD(net.parameters(), 0.1), torch.Tensor.backward, kind)


KINDS = (CopiedAverages, SwappedAverages, StateDictAverages, AssignedAverages)
FSDP = {"strategy": "fsdp"}


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (FSDP, CopiedAverages),
        pytest.param(FSDP, SwappedAverages, marks=pytest.mark.matrix),
        pytest.param(FSDP, StateDictAverages, marks=pytest.mark.matrix),
        *(pytest.param({}, kind, marks=pytest.mark.matrix) for kind in KINDS),
    ],
)
def test_swapping_averages_in_and_out_matches_one_process(layout: dict[str, Any], kind: Any) -> None:
    assert run_ranks(train_prepared, 2, layout, kind)[0] == pytest.approx(train_by_hand(kind), rel=1e-5)


@pytest.mark.matrix
def test_assigned_averages_are_refused_at_evaluation() -> None:
    with pytest.raises(RankFailed, match=r"`parameter\.data = tensor` after prepare\(\), which changes nothing"):
        run_ranks(train_prepared, 2, FSDP, AssignedAverages)


def train_with_averaged_copy() -> list[float]:
    """Average whole weights into a copy from before `prepare()`. Return the copy's output after each update."""
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    net = build_model()
    average = copy.deepcopy(net)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    outputs = []
    for _ in range(3):
        accelerator.backward(model(torch.ones(2, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        state = accelerator.get_state_dict(model)
        with torch.no_grad():
            for name, value in average.state_dict().items() if state else ():
                value.lerp_(state[name], 0.1)
            outputs.append(float(average(torch.ones(2, 4)).sum()))
    return outputs


@pytest.mark.matrix
def test_averaging_into_a_copy_from_before_prepare() -> None:
    outputs = run_ranks(train_with_averaged_copy, 2)[0]
    net = build_model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    average = torch.optim.swa_utils.AveragedModel(net, avg_fn=lambda old, new, count: torch.lerp(old, new, 0.1))
    average.n_averaged += 1  # the initial copy counts as the first model
    expected = []
    for _ in range(3):
        net(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(net)
        with torch.no_grad():
            expected.append(float(average(torch.ones(2, 4)).sum()))
    assert outputs == pytest.approx(expected, rel=1e-5)
