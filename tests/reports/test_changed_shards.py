"""Tests that a shard changed in place on one rank only raises an error, and that a change on all ranks does not."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headway import Accelerator
from tests.distributed.ranks import RankFailed, run_ranks


def build_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))


@torch.no_grad()
def scale(model: Any) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.5)


def initialize(model: Any) -> None:
    model.apply(lambda module: getattr(module, "reset_parameters", lambda: None)())


def train(
    layout: dict[str, Any], change: Any, ranks: list[int], moment: int, name: str, num_steps: int, folder: str
) -> list[float]:
    accelerator = Accelerator(cpu=True, **layout)
    net = build_model()
    optimizer = getattr(torch.optim, name)(net.parameters(), 0.05)
    model, optimizer = accelerator.prepare(net, optimizer)
    for number in range(num_steps):
        if number == moment and accelerator.process_index in ranks:
            change(model)
        if folder and number == 3:
            accelerator.save_state(folder)
            accelerator.load_state(folder)
        accelerator.backward(model(torch.ones(2, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    return [float(value.sum()) for value in state.values()]


FSDP = {"strategy": "fsdp"}


@pytest.mark.parametrize(
    ("change", "moment", "name"),
    [
        (scale, 0, "AdamW"),
        pytest.param(initialize, 0, "SGD", marks=pytest.mark.matrix),
        pytest.param(scale, 5, "AdamW", marks=pytest.mark.matrix),
        pytest.param(scale, 3, "SGD", marks=pytest.mark.matrix),
    ],
)
def test_change_on_one_rank_raises(change: Any, moment: int, name: str) -> None:
    with pytest.raises(RankFailed, match=r"changed in place on some ranks alone: 0.weight on rank 1"):
        run_ranks(train, 2, FSDP, change, [1], moment, name, 8, "")


@pytest.mark.parametrize(
    ("layout", "moment", "name"),
    [
        (FSDP, 5, "AdamW"),
        pytest.param(FSDP, 0, "SGD", marks=pytest.mark.matrix),
        pytest.param(FSDP, 2, "NAdam", marks=pytest.mark.matrix),
        pytest.param(FSDP, 2, "Adadelta", marks=pytest.mark.matrix),
        pytest.param({"strategy": "hsdp=1"}, 2, "AdamW", marks=pytest.mark.matrix),
    ],
)
def test_change_on_all_ranks_matches_one_process(
    layout: dict[str, Any], moment: int, name: str, tmp_path: Path
) -> None:
    values = run_ranks(train, 2, layout, scale, [0, 1], moment, name, 9, str(tmp_path / "state"))[0]
    net = build_model()
    optimizer = getattr(torch.optim, name)(net.parameters(), 0.05)
    for number in range(9):
        if number == moment:
            scale(net)
        net(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = [float(value.sum()) for value in net.state_dict().values()]
    assert values == pytest.approx(expected, rel=1e-3, abs=1e-4)
