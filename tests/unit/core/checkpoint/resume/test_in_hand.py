"""Test a preemption while a fetched batch is not trained on yet: the run trains on it first and skips no batch."""

import os
import signal
import time
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from headway import Accelerator, ProjectConfiguration, set_seed, skip_first_batches
from headway.core.runtime import process
from headway.errors import Preempted


class Draws(Dataset):
    """Dataset of random rows. The read with the number `strike` sends SIGTERM and waits until it is handled."""

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


def train_side_by_side(one, other, learn, _):
    for batch, beside in zip(one, other):
        learn(batch, beside)


def evaluate_before_each_batch(one, other, learn, evaluate):
    for batch in one:
        for held_out in other:
            evaluate(held_out)
        learn(batch)


def train_on_collected_batches(one, _, learn, __):
    rows = iter(one)
    while batches := list(islice(rows, 2)):
        for batch in batches:
            learn(batch)


class Killed(Exception):
    """Error that stands for a kill."""


def select_trained(told):
    return [line for line in told if line[0] == "trained"]


LOOPS = {
    "side_by_side": train_side_by_side,
    "evaluated_first": evaluate_before_each_batch,
    "collected": train_on_collected_batches,
}


def train(folder, loop, steps, strike, killed_after=0):
    """Run one process. Return its record of micro-batches and evaluations, whether it was preempted, and its reads."""
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
        if killed_after and len(select_trained(told)) == killed_after:
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "steps"),
    [("side_by_side", 1), ("side_by_side", 2), ("evaluated_first", 1), ("evaluated_first", 2), ("collected", 2)],
)
def test_fetched_batches_are_trained_on_before_the_run_ends(tmp_path, loop, steps):
    whole, _, num_draws = train(tmp_path / "whole", loop, steps, strike=0)
    num_stopped = 0
    for strike in range(1, num_draws, 3):
        first, was_stopped, _ = train(tmp_path / f"{strike}", loop, steps, strike)
        rest = train(tmp_path / f"{strike}", loop, steps, strike=0)[0] if was_stopped else []
        num_stopped += was_stopped
        # Interrupted evaluations and micro-batches of an open window run again.
        known = sorted(map(repr, {*first, *rest}))
        assert known == sorted(map(repr, set(whole))), (strike, first, rest)
        assert select_trained(rest) == select_trained(whole)[len(select_trained(whole)) - len(select_trained(rest)) :]
    assert num_stopped >= num_draws // 3 - 8


@pytest.mark.parametrize("loop", ["side_by_side", "evaluated_first"])
def test_window_resumes_at_its_first_batch(tmp_path, loop):
    """Save after the third micro-batch with two per update. The resumed run trains on the third one again."""
    whole = select_trained(train(tmp_path / "whole", loop, 2, strike=0)[0])
    with pytest.raises(Killed):
        train(tmp_path / "saved", loop, 2, strike=0, killed_after=3)
    assert select_trained(train(tmp_path / "saved", loop, 2, strike=0)[0]) == whole[2:]


def find_end_positions(loop, steps, trains=True):
    """Return, for each of two loaders, the numbers of consumed batches at which an epoch of the run may end."""
    process.reset()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = torch.nn.Linear(3, 1)
    loaders = [DataLoader(torch.ones(7, 3)), DataLoader(torch.ones(2, 3))]
    model, optimizer, one, other = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), *loaders)
    places = []
    accelerator._checkpoint_state.progress.set_preemption_check(
        lambda loader: places.append((loader is one, loader.num_consumed))
    )

    def learn(batch):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()

    loop(one, other, learn)
    return [place for is_one, place in places if is_one], [place for is_one, place in places if not is_one]


def test_dropped_batches_do_not_prevent_the_end_of_a_run():
    def train_on_last_batches(one, other, learn):
        for number, batch in enumerate(one):
            if number >= 5:
                learn(batch)

    assert find_end_positions(train_on_last_batches, 1)[0] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert find_end_positions(train_on_last_batches, 2)[0] == [0, 2, 4, 6, 7]


def test_evaluations_can_end_the_run_at_each_batch():
    def train_and_evaluate(one, other, learn):
        for batch in one:
            learn(batch)
            if one.num_consumed == 3:
                list(other)
        next(iter(one))
        list(other)

    assert find_end_positions(train_and_evaluate, 2) == ([0, 1, 2, 3, 4, 5, 6, 7, 0], [0, 1, 2, 0, 1, 2])


def test_second_pass_begins_without_fetched_batches():
    def read_three_times(one, other, learn):
        for batch in one:
            learn(batch)
        for _ in range(2):
            for batch in one:
                pass

    assert find_end_positions(read_three_times, 3)[0] == [0, 1, 2, 3, 4, 5, 6, 7, 0, 3, 6, 0, 3, 6]


def test_skipping_view_can_end_the_run_like_its_loader():
    def train_on_the_rest(one, other, learn):
        for loader in (skip_first_batches(one, 4), one):
            rows = iter(loader)
            while batches := list(islice(rows, 2)):
                for batch in batches:
                    learn(batch)

    assert find_end_positions(train_on_the_rest, 2) == ([0, 2, 4, 6], [4, 6])
