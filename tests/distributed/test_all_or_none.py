"""A load or save that fails on one rank fails on all ranks: a failed load changes nothing, a failed save leaves nothing behind."""

import tempfile
from pathlib import Path

import pytest
import torch

from headway import Accelerator
from headway.errors import CheckpointError
from tests.distributed.ranks import run_ranks


class FailingState:
    """Object whose `load_state_dict` raises on rank 1."""

    def __init__(self, rank, value):
        self.rank, self.value = rank, value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        if self.rank == 1:
            raise ValueError("not on this rank")
        self.value = state["value"]


def load_failing_state(folder):
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    failing = FailingState(accelerator.process_index, 1)
    accelerator.register_for_checkpointing(failing)
    accelerator.save_state(folder)
    with torch.no_grad():
        model.weight.fill_(7)
    optimizer.param_groups[0]["lr"], failing.value = 0.5, 2
    try:
        accelerator.load_state(folder)
    except CheckpointError as error:
        return str(error), model.weight.tolist(), optimizer.param_groups[0]["lr"], failing.value
    return None


@pytest.mark.slow
def test_load_that_fails_on_one_rank_changes_nothing_on_any_rank():
    with tempfile.TemporaryDirectory() as folder:
        for message, weight, rate, value in run_ranks(load_failing_state, 2, f"{folder}/mine"):
            assert "rank 1: ValueError: not on this rank" in message
            assert "nothing was changed" in message
            assert (weight, rate, value) == ([[7.0, 7.0]], 0.5, 2)


def save_with_failing_hook(folder):
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


def test_save_hook_error_on_one_rank_is_raised_on_all_and_later_saves_succeed():
    with tempfile.TemporaryDirectory() as folder:
        messages = run_ranks(save_with_failing_hook, 2, f"{folder}/mine")
        assert all("rank 1: KeyError" in message for message in messages)
        assert sorted(path.name for path in Path(folder).iterdir()) == ["latest", "mine"]


def save_unsupported_state(folder):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 1))
    odd = FailingState(0, object() if accelerator.process_index == 1 else 1)
    accelerator.register_for_checkpointing(odd)
    try:
        accelerator.save_state(folder)
    except CheckpointError as error:
        odd.value = 1
        accelerator.save_state(folder)
        return str(error)
    return None


def test_unsupported_state_on_one_rank_is_an_error_on_all():
    with tempfile.TemporaryDirectory() as folder:
        first, second = run_ranks(save_unsupported_state, 2, f"{folder}/mine")
        assert "rank 1: CheckpointError: custom/0.value is a builtins.object" in first
        assert second.startswith("custom/0.value is a builtins.object")
        assert sorted(path.name for path in Path(folder).iterdir()) == ["latest", "mine"]
