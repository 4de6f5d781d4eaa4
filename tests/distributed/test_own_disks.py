"""Machines that share no folder: each holds a complete replica, and a checkpoint exists where all of them hold the same one."""

import os
import shutil
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed
from headway.core.checkpoint.folders import list_committed
from headway.core.checkpoint.format.manifest import read_manifest
from headway.core.checkpoint.loading.files import verify_checkpoint
from headway.core.runtime import process
from headway.errors import CheckpointError
from tests.distributed.ranks import run_ranks


class Machine:
    """This rank as the only one of a machine with a disk of its own."""

    def __init__(self, root, **project):
        set_seed(3)
        rank = int(os.environ["RANK"])
        self.disk = Path(root, f"disk{rank}")
        project = ProjectConfiguration(self.disk, automatic_checkpoint_naming=True, **project)
        self.accelerator = accelerator = Accelerator(cpu=True, project_config=project)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2, shuffle=True)
        self.model, self.optimizer, self.loader = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), 0.01), loader
        )

    def train(self, save_at=(), stop_after=None):
        losses = []
        for _ in self.accelerator.epochs(1):
            for x, y in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = (self.model(x) - y).square().mean()
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                losses.append(loss.item())
                if self.accelerator.num_updates in save_at:
                    self.accelerator.save_state(blocking=self.accelerator.num_updates % 2 == 0)
                if self.accelerator.num_updates == stop_after:
                    break
            if stop_after is not None:
                break
        self.accelerator.wait_for_save()
        return losses

    def held(self):
        return sorted(path.name for path in list_committed(self.disk / "checkpoints"))


def restored(root, **project):
    machine = Machine(root, **project)
    found = machine.accelerator.resume("latest")
    return (None if found is None else found.folder.name), machine.accelerator.num_updates, machine


def two_disks(root):
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    told = {}
    whole = Machine(f"{root}/whole").train()
    assert Machine(f"{root}/whole").held() == []

    first = Machine(root, total_limit=2)
    is_first = first.accelerator.is_main_process
    assert first.accelerator.resume("latest") is None
    told["begun"] = first.train(save_at=(2, 3, 4), stop_after=4) == whole[:4]
    told["held"] = first.held()  # rotation waits for both machines, and has come
    told["hashes"] = [read_manifest(first.disk / "checkpoints" / name).sha256 for name in first.held()]
    for name in first.held():
        verify_checkpoint(first.disk / "checkpoints" / name)  # a complete replica: every file is here

    name, updates, machine = restored(root, total_limit=2)
    told["newest"] = (name, updates, machine.train() == whole[4:])

    if not is_first:  # another machine in the place of this one, with an empty disk: the first hands its replica on
        shutil.rmtree(machine.disk)
    machine.accelerator.wait_for_everyone()
    name, updates, machine = restored(root, total_limit=2)
    told["replaced"] = (name, updates, machine.train() == whole[4:], machine.held()[-1:])
    told["whole again"] = read_manifest(machine.disk / "checkpoints/checkpoint_2").sha256
    told["litter"] = [path.name for path in (machine.disk / "checkpoints").iterdir() if path.name.startswith(".")]
    if not is_first:
        shutil.rmtree(machine.disk)
    machine.accelerator.wait_for_everyone()
    if not is_first:  # its disk takes nothing: an error on both
        machine.disk.write_text("no folder")
    machine.accelerator.wait_for_everyone()
    try:
        restored(root)
    except CheckpointError as error:
        told["refused"] = "could not be handed on to a machine without it: rank 1: " in str(error)
    if not is_first:
        machine.disk.unlink()
    machine.accelerator.wait_for_everyone()
    restored(root)
    if not is_first:  # as it was, with the older one too
        shutil.copytree(f"{root}/disk0/checkpoints/checkpoint_1", machine.disk / "checkpoints/checkpoint_1")
    machine.accelerator.wait_for_everyone()

    if is_first:  # one disk lost its newest: both take the one before
        shutil.rmtree(machine.disk / "checkpoints/checkpoint_2")
    machine.accelerator.wait_for_everyone()
    name, updates, machine = restored(root)
    told["lost on one"] = name, updates, machine.accelerator.save_iteration  # the next name is new on both

    victim = machine.disk / "checkpoints/checkpoint_1/model-00000.safetensors"
    if not is_first:  # the other one's replica is damaged: nothing is left that both hold
        victim.write_bytes(victim.read_bytes()[:-1] + b"!")
    machine.accelerator.wait_for_everyone()
    try:
        restored(root)
    except CheckpointError as error:
        told["damaged"] = "is damaged" in str(error)

    # A disk that cannot be written to: an error on both, and nothing new on either.
    blocked = Machine(f"{root}/blocked")
    if not is_first:
        blocked.disk.parent.mkdir(parents=True, exist_ok=True)
        blocked.disk.write_text("no folder")
    blocked.accelerator.wait_for_everyone()
    try:
        blocked.accelerator.save_state()
    except CheckpointError as error:
        told["blocked"] = "rank 1" in str(error)
    behind = Machine(f"{root}/behind", total_limit=1)
    for _ in range(3):
        behind.accelerator.save_state(blocking=False)
    behind.accelerator.wait_for_save()
    told["behind"] = behind.held()
    told["nothing new"] = not (blocked.disk / "checkpoints").exists() or blocked.held() == []
    process.reset()
    return told


def test_each_machine_keeps_a_whole_replica(tmp_path):
    first, second = run_ranks(two_disks, 2, str(tmp_path))
    assert first == second
    assert first["begun"]
    assert first["held"] == ["checkpoint_1", "checkpoint_2"]
    assert len(set(first["hashes"])) == 2
    assert first["newest"] == ("checkpoint_2", 4, True)
    assert first["replaced"] == ("checkpoint_2", 4, True, ["checkpoint_2"])
    assert first["whole again"] == first["hashes"][1]
    assert first["litter"] == []
    assert first["refused"]
    assert first["lost on one"] == ("checkpoint_1", 3, 3)
    assert first["damaged"]
    assert first["blocked"]
    assert first["behind"] == ["checkpoint_2"]
    assert first["nothing new"]
