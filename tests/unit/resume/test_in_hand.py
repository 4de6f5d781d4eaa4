"""A run that is asked to end while a batch waits for its training: the batch is trained on first, and nothing is left out."""

import os
import signal
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from headway import Accelerator, ProjectConfiguration, set_seed
from headway.errors import Preempted
from headway.runtime import process


class Draws(Dataset):
    """Rows that are drawn as they are read; one read sends SIGTERM and waits until it is heard."""

    def __init__(self, calls, strike):
        self.calls, self.strike = calls, strike

    def __len__(self):
        return 7

    def __getitem__(self, index):
        self.calls.append(index)
        if len(self.calls) == self.strike:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
        return index, torch.rand(3)


def side_by_side(one, other, learn, _):
    for batch, beside in zip(one, other):
        learn(batch, beside)


def evaluated_first(one, other, learn, evaluate):
    for batch in one:
        for held_out in other:
            evaluate(held_out)
        learn(batch)


class Killed(Exception):
    """Takes the place of a kill."""


def trained(told):
    return [line for line in told if line[0] == "trained"]


LOOPS = {f.__name__: f for f in (side_by_side, evaluated_first)}


def train(folder, loop, steps, strike, killed_after=0):
    """One process's life; what each micro-batch and evaluation saw, and whether it was asked to end."""
    process.reset()
    set_seed(3)
    told, calls = [], []
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project, gradient_accumulation_steps=steps)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loaders = [DataLoader(Draws(calls, strike), batch_size=2, shuffle=shuffle) for shuffle in (True, False)]
    model, optimizer, one, other = accelerator.prepare(model, optimizer, *loaders)
    accelerator.resume("latest")

    def learn(*batches):
        with accelerator.accumulate(model):
            loss = sum(model(x).square().mean() for _, x in batches)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        told.append(("trained", *(tuple(i.tolist()) for i, _ in batches), loss.item(), accelerator.num_updates))
        if killed_after and len(trained(told)) == killed_after:
            accelerator.save_state()
            raise Killed

    def evaluate(batch):
        told.append(("evaluated", tuple(batch[0].tolist()), model(batch[1]).sum().item()))

    try:
        for _ in accelerator.epochs(2):
            LOOPS[loop](one, other, learn, evaluate)
    except Preempted:
        return told, True, len(calls)
    return told, False, len(calls)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("loop", LOOPS)
def test_what_was_fetched_is_trained_on_before_the_run_ends(tmp_path, loop, steps):
    whole, _, num_draws = train(tmp_path / "whole", loop, steps, strike=0)
    num_stopped = 0
    for strike in range(1, num_draws, 3):
        first, was_stopped, _ = train(tmp_path / f"{strike}", loop, steps, strike)
        rest = train(tmp_path / f"{strike}", loop, steps, strike=0)[0] if was_stopped else []
        num_stopped += was_stopped
        # An evaluation that was broken off is run again, whole; micro-batches of an open window too.
        known = sorted(map(repr, {*first, *rest}))
        assert known == sorted(map(repr, set(whole))), (strike, first, rest)
        assert trained(rest) == trained(whole)[len(trained(whole)) - len(trained(rest)) :]
    assert num_stopped >= num_draws // 3 - 8


@pytest.mark.parametrize("loop", ["side_by_side", "evaluated_first"])
def test_a_window_begins_before_the_first_of_the_batches_that_it_is_made_of(tmp_path, loop):
    """Saved after the third of two micro-batches an update: the resumed run trains on the third again."""
    whole = trained(train(tmp_path / "whole", loop, 2, strike=0)[0])
    with pytest.raises(Killed):
        train(tmp_path / "saved", loop, 2, strike=0, killed_after=3)
    assert trained(train(tmp_path / "saved", loop, 2, strike=0)[0]) == whole[2:]
