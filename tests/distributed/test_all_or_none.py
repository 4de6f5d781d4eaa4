"""A load that one rank cannot take up changes nothing on any rank; a save that one rank cannot make is refused on all."""

import tempfile
from pathlib import Path

import pytest
import torch

from headway import Accelerator
from headway.errors import CheckpointError
from tests.distributed.ranks import run_ranks


class Fussy:
    """Takes no state up on one rank."""

    def __init__(self, rank, value):
        self.rank, self.value = rank, value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        if self.rank == 1:
            raise ValueError("not on this rank")
        self.value = state["value"]


def load(folder):
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    fussy = Fussy(accelerator.process_index, 1)
    accelerator.register_for_checkpointing(fussy)
    accelerator.save_state(folder)
    with torch.no_grad():
        model.weight.fill_(7)
    optimizer.param_groups[0]["lr"], fussy.value = 0.5, 2
    try:
        accelerator.load_state(folder)
    except CheckpointError as error:
        return str(error), model.weight.tolist(), optimizer.param_groups[0]["lr"], fussy.value
    return None


@pytest.mark.slow
def test_a_load_that_fails_on_one_rank_is_undone_on_all():
    with tempfile.TemporaryDirectory() as folder:
        for told, weight, rate, value in run_ranks(load, 2, f"{folder}/mine"):
            assert "rank 1: ValueError: not on this rank" in told
            assert "nothing was changed" in told
            assert (weight, rate, value) == ([[7.0, 7.0]], 0.5, 2)


def hook_fails(folder):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 1))

    def hook(models, weights, staging):
        if accelerator.process_index == 1:
            raise KeyError("of the user's")

    handle = accelerator.register_save_state_pre_hook(hook)
    try:
        accelerator.save_state(folder)
    except CheckpointError as error:
        handle.remove()
        accelerator.save_state(folder)
        return str(error)
    return None


def test_a_hook_that_raises_on_one_rank_is_told_on_all_and_later_saves_go_on():
    with tempfile.TemporaryDirectory() as folder:
        told = run_ranks(hook_fails, 2, f"{folder}/mine")
        assert all("rank 1: KeyError" in each for each in told)
        assert sorted(path.name for path in Path(folder).iterdir()) == ["latest", "mine"]


def one_cannot_be_saved(folder):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 1))
    odd = Fussy(0, object() if accelerator.process_index == 1 else 1)
    accelerator.register_for_checkpointing(odd)
    try:
        accelerator.save_state(folder)
    except CheckpointError as error:
        odd.value = 1
        accelerator.save_state(folder)
        return str(error)
    return None


def test_a_state_that_one_rank_cannot_save_is_told_on_all():
    with tempfile.TemporaryDirectory() as folder:
        first, second = run_ranks(one_cannot_be_saved, 2, f"{folder}/mine")
        assert "rank 1: CheckpointError: custom/0.value is a builtins.object" in first
        assert second.startswith("custom/0.value is a builtins.object")
        assert sorted(path.name for path in Path(folder).iterdir()) == ["latest", "mine"]
