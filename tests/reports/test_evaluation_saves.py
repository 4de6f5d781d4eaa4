"""A run that is saved in an evaluation, and ends there or later: every evaluation of the resumed run sees all of its data.

The expected rows are all rows of each loader in each epoch, and the expected weights those of a loop in plain PyTorch.
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
    """Ends a run as a kill would, after what it has saved."""


def plain_weights(world_size):
    """The same training by hand, in global batches, with a learning rate that halves after each epoch."""
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
    """Return (rows trained on by epoch, rows of each evaluation by epoch and loader, weights, whether the run came to its end)."""
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
    trained, evaluated, is_whole = {}, {}, False

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
        is_whole = True
    except KeyboardInterrupt:
        accelerator.save_state()
    except (Stop, SystemExit):
        pass
    accelerator.end_training()
    return (
        trained,
        evaluated,
        [each.detach().clone() for each in accelerator.unwrap_model(model).parameters()],
        is_whole,
    )


def interrupt(at_epoch, at_loader, at_rows, how):
    """Act once at that place of a run."""

    def act(accelerator, epoch, loader, count):
        if how == "save" and (epoch, loader, count) == (at_epoch + 1, None, 1):
            raise Stop  # long after the save, in the next epoch's training
        if (epoch, loader) != (at_epoch, at_loader) or count < at_rows:
            return
        if how == "ctrl-c":
            raise KeyboardInterrupt
        if how == "sigterm" and accelerator.is_main_process and count < at_rows + BATCH * accelerator.num_processes:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)  # it is heard by a thread; the other ranks wait in their next exchange
        if how == "save" and count < at_rows + BATCH * accelerator.num_processes:
            accelerator.save_state()

    return act


def ignore(accelerator, epoch, loader, count):
    """Act nowhere."""


PLACES = {"first batch": (0, 1), "second loader": (1, 1), "last batch": (1, NUM_EVAL)}


def run_all(root, how, kind):
    """Each interrupted run, interrupted once more at the same place, and gone on with; the parts that each of them did."""
    told = {}
    for name, (loader, rows) in PLACES.items():
        folder = f"{root}/{name}"
        parts = [train(folder, interrupt(0, loader, rows, how), kind)]
        if kind == "at an epoch's end" and not parts[-1][-1]:
            parts.append(train(folder, interrupt(0, loader, rows, how), kind))
        told[name] = parts if parts[-1][-1] else [*parts, train(folder, ignore, kind)]
    return told


def check(parts, world_size, kind):
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
def test_an_interrupted_evaluation_at_an_epochs_end_is_repeated_whole(world_size, how, tmp_path):
    kind = "at an epoch's end"
    for told in run_ranks(run_all, world_size, str(tmp_path), how, kind):
        for parts in told.values():
            trained = check(parts, world_size, kind)
            # Nothing is trained on twice, and the schedule ticks once for each epoch.
            assert trained == {epoch: ROWS.flatten().tolist() for epoch in range(NUM_EPOCHS)}
            torch.testing.assert_close(parts[-1][2], plain_weights(world_size))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_that_is_saved_in_an_evaluation_and_killed_later(world_size, tmp_path):
    kind = "at an epoch's end"
    for told in run_ranks(run_all, world_size, str(tmp_path), "save", kind):
        for parts in told.values():
            check(parts, world_size, kind)
            torch.testing.assert_close(parts[-1][2], plain_weights(world_size))


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_evaluation_within_an_epoch(world_size, tmp_path):
    """The interrupted one is not made again, as the loop goes on with the next batch; each later one is whole."""
    kind = "within an epoch"
    for told in run_ranks(run_all, world_size, str(tmp_path), "ctrl-c", kind):
        for parts in told.values():
            trained = check(parts, world_size, kind)
            assert trained == {epoch: ROWS.flatten().tolist() for epoch in range(NUM_EPOCHS)}
            torch.testing.assert_close(parts[-1][2], plain_weights(world_size))


def test_the_rest_runs_on_another_number_of_processes(tmp_path):
    folder, kind = str(tmp_path), "at an epoch's end"
    first = run_ranks(train, 2, folder, interrupt_in_second_loader, kind)[0]
    rest = run_ranks(train, 1, folder, ignore, kind)[0]
    trained = check([first, rest], 1, kind)
    assert trained == {epoch: ROWS.flatten().tolist() for epoch in range(NUM_EPOCHS)}
    torch.testing.assert_close(rest[2], plain_weights(2))


def interrupt_in_second_loader(accelerator, epoch, loader, count):
    interrupt(0, 1, 1, "ctrl-c")(accelerator, epoch, loader, count)


# ---------------------------------------------------------------- loaders that are no evaluation


def read_in_training(folder, kind, save_at):
    """Rows that a loop over two loaders gives, and how often each is given by a run that saves at a step and one that goes on."""
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
    told = {}
    for kind in ("zip", "one", "read only"):
        # In the first batch of the second epoch nothing has been trained yet in these passes.
        for save_at in (1, 8 // world_size + 1) if kind == "zip" else (1, 3):
            folder = f"{root}/{kind}{save_at}"
            told[kind, save_at] = read_in_training(folder, kind, save_at) + read_in_training(folder, kind, None)
    return told


@pytest.mark.parametrize("world_size", [1, 2])
def test_loaders_that_are_trained_on_or_only_read_go_on_in_mid_epoch(world_size, tmp_path):
    for rank, told in enumerate(run_ranks(run_read_in_training, world_size, str(tmp_path), world_size)):
        firsts = [float(first) for first in range(2 * rank, 16, 2 * world_size)]
        for (kind, _), seen in told.items():
            epoch = [row for first in firsts for row in ((first, first + 100) if kind == "zip" else (first,))]
            assert seen == epoch * 2, kind
