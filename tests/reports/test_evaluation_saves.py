"""Tests of runs saved during an evaluation: each evaluation of the resumed run covers all of its data.

The expected rows are all rows of each loader in each epoch. The expected weights come from a loop in plain PyTorch.
"""

import os
import signal
import time

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration
from tests.distributed.ranks import run_ranks

NUM_TRAIN, NUM_EVAL, NUM_EPOCHS, BATCH = 40, 20, 3, 4
ROWS = torch.arange(float(NUM_TRAIN))[:, None] / NUM_TRAIN


class Stop(Exception):
    """Ends a run like a kill, some time after its last save."""


def train_by_hand(world_size):
    """Train in plain PyTorch with global batches and a learning rate that halves after each epoch. Return the weights."""
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(NUM_EPOCHS):
        for rows in ROWS.split(BATCH * world_size):
            (model(rows) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    return [parameter.detach() for parameter in model.parameters()]


def build_model():
    torch.manual_seed(3)
    return torch.nn.Linear(1, 1)


def evaluate(accelerator, loader, seen, act):
    for (rows,) in loader:
        seen += accelerator.gather_for_metrics(rows).flatten().tolist()
        act(accelerator)


def train(folder, act, kind):
    """Return (rows trained on by epoch, rows evaluated by epoch and loader, weights, whether the run completed)."""
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project, step_scheduler_with_optimizer=False)
    loaders = [
        DataLoader(TensorDataset(ROWS), batch_size=BATCH),
        DataLoader(TensorDataset(torch.arange(float(NUM_EVAL))), batch_size=BATCH),
        DataLoader(TensorDataset(torch.arange(float(NUM_EVAL)) + 100), batch_size=BATCH, shuffle=True),
    ]
    model, optimizer, scheduler, first, *evaluations = accelerator.prepare(model, optimizer, scheduler, *loaders)
    accelerator.resume("latest")
    trained, evaluated, is_complete = {}, {}, False

    def evaluate_all(epoch):
        for number, loader in enumerate(evaluations):
            seen = evaluated.setdefault((epoch, number), [])
            seen.clear()
            evaluate(accelerator, loader, seen, lambda it: act(it, epoch, number, len(seen)))

    try:
        for epoch in accelerator.epochs(NUM_EPOCHS):
            for step, (rows,) in enumerate(first):
                with accelerator.accumulate(model):
                    accelerator.backward((model(rows) - 1).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                trained.setdefault(epoch, []).extend(accelerator.gather(rows).flatten().tolist())
                act(accelerator, epoch, None, step)
                if kind == "within an epoch" and step == 2:
                    evaluate_all(epoch)
            scheduler.step()
            if kind != "within an epoch":
                evaluate_all(epoch)
        is_complete = True
    except KeyboardInterrupt:
        accelerator.save_state()
    except (Stop, SystemExit):
        pass
    accelerator.end_training()
    return (
        trained,
        evaluated,
        [each.detach().clone() for each in accelerator.unwrap_model(model).parameters()],
        is_complete,
    )


def interrupt(stop_epoch, stop_loader, stop_rows, how):
    """Return a callback that interrupts or saves once, at the given place."""

    def act(accelerator, epoch, loader, count):
        if how == "save" and (epoch, loader, count) == (stop_epoch + 1, None, 1):
            raise Stop  # later than the save, while training in the next epoch
        if (epoch, loader) != (stop_epoch, stop_loader) or count < stop_rows:
            return
        if how == "ctrl-c":
            raise KeyboardInterrupt
        if how == "sigterm" and accelerator.is_main_process and count < stop_rows + BATCH * accelerator.num_processes:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)  # A thread handles the signal. The other ranks wait at their next collective operation.
        if how == "save" and count < stop_rows + BATCH * accelerator.num_processes:
            accelerator.save_state()

    return act


def ignore(accelerator, epoch, loader, count):
    """Do nothing."""


PLACES = {"first batch": (0, 1), "second loader": (1, 1), "last batch": (1, NUM_EVAL)}


def run_all(root, how, kind):
    """Interrupt and resume a run at each of PLACES. Return the results of all its parts by place."""
    results = {}
    for name, (loader, rows) in PLACES.items():
        folder = f"{root}/{name}"
        parts = [train(folder, interrupt(0, loader, rows, how), kind)]
        if kind == "at an epoch's end" and not parts[-1][-1]:
            parts.append(train(folder, interrupt(0, loader, rows, how), kind))
        results[name] = parts if parts[-1][-1] else [*parts, train(folder, ignore, kind)]
    return results


def check(parts, world_size, kind):
    """Check that each evaluation covers all rows, and return the rows trained on by epoch."""
    trained, evaluated = {}, {}
    assert len(parts) > 1
    assert [part[-1] for part in parts] == [False] * (len(parts) - 1) + [True]
    for rows, seen, _, _ in parts:
        for epoch, each in rows.items():
            trained.setdefault(epoch, []).extend(each)
        evaluated.update({place: each for place, each in seen.items() if each})
    last = evaluated if kind == "at an epoch's end" else {k: v for k, v in evaluated.items() if k[0] > 0}
    assert last.keys() == {(epoch, number) for epoch in range(NUM_EPOCHS) for number in (0, 1)} - (
        set() if kind == "at an epoch's end" else {(0, 0), (0, 1)}
    )
    for (_, number), rows in last.items():
        assert sorted(rows) == [100.0 * number + row for row in range(NUM_EVAL)]
    return trained


@pytest.mark.parametrize("how", ["ctrl-c", pytest.param("sigterm", marks=pytest.mark.slow)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_evaluation_interrupted_at_the_end_of_an_epoch_is_repeated(world_size, how, tmp_path):
    kind = "at an epoch's end"
    for results in run_ranks(run_all, world_size, str(tmp_path), how, kind):
        for parts in results.values():
            trained = check(parts, world_size, kind)
            # No row is trained on twice, and the schedule advances once per epoch.
            assert trained == {epoch: ROWS.flatten().tolist() for epoch in range(NUM_EPOCHS)}
            torch.testing.assert_close(parts[-1][2], train_by_hand(world_size))


@pytest.mark.parametrize("world_size", [1, 2])
def test_run_saved_during_evaluation_and_killed_later(world_size, tmp_path):
    kind = "at an epoch's end"
    for results in run_ranks(run_all, world_size, str(tmp_path), "save", kind):
        for parts in results.values():
            check(parts, world_size, kind)
            torch.testing.assert_close(parts[-1][2], train_by_hand(world_size))


@pytest.mark.parametrize("world_size", [1, 2])
def test_evaluation_interrupted_within_an_epoch_is_not_repeated(world_size, tmp_path):
    """The interrupted evaluation is not repeated, since training resumes with the next batch. Each later one is complete."""
    kind = "within an epoch"
    for results in run_ranks(run_all, world_size, str(tmp_path), "ctrl-c", kind):
        for parts in results.values():
            trained = check(parts, world_size, kind)
            assert trained == {epoch: ROWS.flatten().tolist() for epoch in range(NUM_EPOCHS)}
            torch.testing.assert_close(parts[-1][2], train_by_hand(world_size))


def test_resume_with_another_number_of_processes(tmp_path):
    folder, kind = str(tmp_path), "at an epoch's end"
    first = run_ranks(train, 2, folder, interrupt_in_second_loader, kind)[0]
    rest = run_ranks(train, 1, folder, ignore, kind)[0]
    trained = check([first, rest], 1, kind)
    assert trained == {epoch: ROWS.flatten().tolist() for epoch in range(NUM_EPOCHS)}
    torch.testing.assert_close(rest[2], train_by_hand(2))


def interrupt_in_second_loader(accelerator, epoch, loader, count):
    interrupt(0, 1, 1, "ctrl-c")(accelerator, epoch, loader, count)


# ---------------------------------------------------------------- loaders that are not used for evaluation


def read_in_training(folder, kind, save_at):
    """Return the first row of each batch from one or two loaders, up to the step `save_at`, where the run saves and ends."""
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True))
    one, two = (DataLoader(TensorDataset(torch.arange(16.0)[:, None] + start), batch_size=2) for start in (0, 100))
    model, optimizer, one, two = accelerator.prepare(model, optimizer, one, two)
    accelerator.resume("latest")
    seen, step = [], 0
    for _ in accelerator.epochs(2):
        batches = zip(one, two) if kind == "zip" else ((x, None) for x in one)
        for (x,), other in batches:
            seen.append(float(x[0]))
            if other is not None:
                seen.append(float(other[0][0]))
            if kind != "read only":
                with accelerator.accumulate(model):
                    accelerator.backward(model(x / 100).mean())
                    optimizer.step()
                    optimizer.zero_grad()
            step += 1
            if step == save_at:
                accelerator.save_state()
                accelerator.end_training()
                return seen
    accelerator.end_training()
    return seen


def run_read_in_training(root, world_size):
    """Run each kind of loop up to a save and again from there. Return the rows by kind and save step."""
    rows_of_runs = {}
    for kind in ("zip", "one", "read only"):
        # At the first batch of the second epoch, nothing has been trained in the current passes yet.
        for save_at in (1, 8 // world_size + 1) if kind == "zip" else (1, 3):
            folder = f"{root}/{kind}{save_at}"
            rows_of_runs[kind, save_at] = read_in_training(folder, kind, save_at) + read_in_training(folder, kind, None)
    return rows_of_runs


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_and_read_only_loaders_resume_within_an_epoch(world_size, tmp_path):
    for rank, rows_of_runs in enumerate(run_ranks(run_read_in_training, world_size, str(tmp_path), world_size)):
        firsts = [float(first) for first in range(2 * rank, 16, 2 * world_size)]
        for (kind, _), seen in rows_of_runs.items():
            epoch = [row for first in firsts for row in ((first, first + 100) if kind == "zip" else (first,))]
            assert seen == epoch * 2, kind
