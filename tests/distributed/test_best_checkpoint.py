"""`keep_best` and early stopping on several processes."""

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, EarlyStopping, ProjectConfiguration, set_seed
from tests.distributed.ranks import run_ranks
from tests.distributed.test_own_disks import Machine

METRICS = [0.5, 0.2, 0.4, 0.3]


def prepare_training(folder, layout):
    set_seed(1)
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=1, keep_best="min")
    accelerator = Accelerator(cpu=True, project_config=project, strategy=layout)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters(), 0.01), loader)
    return accelerator, model, optimizer, loader


def read_weights(accelerator, model):
    found = accelerator.get_state_dict(model)
    return [tensor.tolist() for tensor in found.values()]


def stop_and_restore_best(root, layout):
    accelerator, model, optimizer, loader = prepare_training(f"{root}/run", layout)
    stopping = EarlyStopping(patience=2)
    accelerator.register_for_checkpointing(stopping)
    saved = []
    for epoch in accelerator.epochs(10):
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        should_stop = stopping.update(METRICS[epoch])
        accelerator.save_state(metric=METRICS[epoch])
        saved.append(read_weights(accelerator, model))
        if should_stop:
            break
    restored = accelerator.resume("best")
    back = read_weights(accelerator, model)
    return restored.folder.name, len(saved), back == saved[1], back == saved[-1], stopping.num_without_gain


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_all_ranks_stop_and_restore_the_best_checkpoint(tmp_path, layout):
    first, second = run_ranks(stop_and_restore_best, 2, str(tmp_path), layout)
    assert first == ("checkpoint_1", 4, True, False, 0)
    assert second[:2] == first[:2]
    assert sorted(path.name for path in Path(tmp_path, "run/checkpoints").glob("checkpoint_*")) == [
        "checkpoint_1", "checkpoint_3",
    ]  # fmt: skip


def update_with_different_values():
    """Update early stopping with values that are equal on all ranks, and with values that differ."""
    Accelerator(cpu=True)
    rank = int(os.environ["RANK"])
    texts = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("headway").addHandler(handler)
    same = EarlyStopping(patience=2)
    for value in (0.1 + 0.2 if rank else 0.3, float("inf"), 0.1):
        same.update(value)
    quiet = list(texts)
    own = EarlyStopping(patience=2, mode="max")
    decisions = [own.update(value) for value in ((1.0, 2.0, 3.0) if rank else (4.0, 1.0, 1.5))]
    ill = EarlyStopping()
    return quiet, same.best, decisions, own.best, ill.update(float("nan") if rank else 1.0), ill.best, texts


def test_ranks_decide_alike_on_different_values():
    first, second = run_ranks(update_with_different_values, 2)
    assert first[:-1] == second[:-1] == ([], 0.1, [False, False, True], 2.5, True, None)
    text, other = first[-1]  # one warning per object
    assert "different values on the ranks (4, 1) and uses their mean" in text
    assert "(1, nan)" in other


def restore_with_own_disks(root):
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    machine = Machine(root, keep_best="max")
    for metric in (0.3, 0.9, 0.5):
        machine.accelerator.save_state(metric=metric)
    machine.accelerator.wait_for_everyone()
    if not machine.accelerator.is_main_process:
        shutil.rmtree(machine.disk)
    again = Machine(root, keep_best="max")
    restored = again.accelerator.resume("best")
    return restored.folder.name, again.list_checkpoints()


def test_rank_with_an_empty_disk_receives_the_best_checkpoint(tmp_path):
    first, second = run_ranks(restore_with_own_disks, 2, str(tmp_path))
    assert first == ("checkpoint_1", ["checkpoint_2", "checkpoint_1", "checkpoint_0"][::-1])
    assert second == ("checkpoint_1", ["checkpoint_1"])
