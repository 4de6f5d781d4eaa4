"""Machines without a shared folder: each keeps a complete replica, and a checkpoint counts only if all of them have it."""

import errno
import io
import os
import shutil
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed
from headway.core.checkpoint.folders import list_committed
from headway.core.checkpoint.format.manifest import read_manifest
from headway.core.checkpoint.loading import copying
from headway.core.checkpoint.loading.files import verify_checkpoint
from headway.core.runtime import process
from headway.core.weights import files
from headway.errors import CheckpointError
from tests.distributed.ranks import run_ranks


class Machine:
    """This rank, as the only one of a machine with its own disk."""

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

    def list_checkpoints(self):
        return sorted(path.name for path in list_committed(self.disk / "checkpoints"))


def resume_machine(root, **project):
    machine = Machine(root, **project)
    found = machine.accelerator.resume("latest")
    return (None if found is None else found.folder.name), machine.accelerator.num_updates, machine


def run_on_two_disks(root):
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    results = {}
    whole = Machine(f"{root}/whole").train()
    assert Machine(f"{root}/whole").list_checkpoints() == []

    first = Machine(root, total_limit=2)
    is_first = first.accelerator.is_main_process
    assert first.accelerator.resume("latest") is None
    results["begun"] = first.train(save_at=(2, 3, 4), stop_after=4) == whole[:4]
    results["held"] = first.list_checkpoints()  # after rotation, which waits for both machines
    results["hashes"] = [read_manifest(first.disk / "checkpoints" / name).sha256 for name in first.list_checkpoints()]
    for name in first.list_checkpoints():
        verify_checkpoint(first.disk / "checkpoints" / name)  # a complete replica: every file exists

    name, updates, machine = resume_machine(root, total_limit=2)
    results["newest"] = (name, updates, machine.train() == whole[4:])

    if not is_first:  # a replacement machine with an empty disk receives the first machine's replica
        shutil.rmtree(machine.disk)
    machine.accelerator.wait_for_everyone()
    name, updates, machine = resume_machine(root, total_limit=2)
    results["replaced"] = (name, updates, machine.train() == whole[4:], machine.list_checkpoints()[-1:])
    results["whole again"] = read_manifest(machine.disk / "checkpoints/checkpoint_2").sha256
    results["litter"] = [path.name for path in (machine.disk / "checkpoints").iterdir() if path.name.startswith(".")]
    if not is_first:
        shutil.rmtree(machine.disk)
    machine.accelerator.wait_for_everyone()
    if not is_first:  # writing to its disk fails: an error on both
        machine.disk.write_text("no folder")
    machine.accelerator.wait_for_everyone()
    try:
        resume_machine(root)
    except CheckpointError as error:
        results["refused"] = "could not be copied to a machine without it: rank 1: " in str(error)
    if not is_first:
        machine.disk.unlink()
    machine.accelerator.wait_for_everyone()
    resume_machine(root)
    if not is_first:  # restores the older checkpoint, too
        shutil.copytree(f"{root}/disk0/checkpoints/checkpoint_1", machine.disk / "checkpoints/checkpoint_1")
    machine.accelerator.wait_for_everyone()

    if is_first:  # one disk lost its newest checkpoint: both use the previous one
        shutil.rmtree(machine.disk / "checkpoints/checkpoint_2")
    machine.accelerator.wait_for_everyone()
    name, updates, machine = resume_machine(root)
    results["lost on one"] = name, updates, machine.accelerator.save_iteration  # the next name is new on both

    victim = machine.disk / "checkpoints/checkpoint_1/model-00000.safetensors"
    if not is_first:  # the other replica is damaged: no checkpoint is left on both machines
        victim.write_bytes(victim.read_bytes()[:-1] + b"!")
    machine.accelerator.wait_for_everyone()
    try:
        resume_machine(root)
    except CheckpointError as error:
        results["damaged"] = "is damaged" in str(error)

    # A disk cannot be written to: an error on both machines, and nothing new on either.
    blocked = Machine(f"{root}/blocked")
    if not is_first:
        blocked.disk.parent.mkdir(parents=True, exist_ok=True)
        blocked.disk.write_text("no folder")
    blocked.accelerator.wait_for_everyone()
    try:
        blocked.accelerator.save_state()
    except CheckpointError as error:
        results["blocked"] = "rank 1" in str(error)
    # The same on rank 0, which is the first to write to the disk in order to find out whether the machines share it.
    blocked = Machine(f"{root}/blocked first")
    if is_first:
        blocked.disk.parent.mkdir(parents=True, exist_ok=True)
        blocked.disk.write_text("no folder")
    blocked.accelerator.wait_for_everyone()
    try:
        blocked.accelerator.save_state()
    except CheckpointError as error:
        results["blocked first"] = "rank 0: " in str(error) and "rank 1: " not in str(error)
    behind = Machine(f"{root}/behind", total_limit=1)
    for _ in range(3):
        behind.accelerator.save_state(blocking=False)
    behind.accelerator.wait_for_save()
    results["behind"] = behind.list_checkpoints()
    results["nothing new"] = not (blocked.disk / "checkpoints").exists() or blocked.list_checkpoints() == []
    process.reset()
    return results


def test_each_machine_keeps_a_complete_replica(tmp_path):
    first, second = run_ranks(run_on_two_disks, 2, str(tmp_path))
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
    assert first["blocked first"]
    assert first["behind"] == ["checkpoint_2"]
    assert first["nothing new"]


def read_with_broken_disk(root):
    """Read a checkpoint on two machines. On the second one, the disk fails while a header is read."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    machine = Machine(root)
    folder = machine.accelerator.save_state()
    machine.accelerator.wait_for_everyone()
    if not machine.accelerator.is_main_process:

        class BrokenFile(io.BytesIO):
            def read(self, *_):
                raise OSError(errno.EIO, "Input/output error")

        real = files.read_header
        files.read_header = lambda file, path: real(BrokenFile(bytes(64)), path)
    try:
        machine.accelerator.load_state(folder)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_failed_read_on_one_machine_is_raised_on_all(tmp_path):
    for error in run_ranks(read_with_broken_disk, 2, str(tmp_path)):
        assert "cannot be read: Input/output error" in error


def copy_with_damage(root):
    """Copy a checkpoint to a second machine. One byte changes in transit."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    machine = Machine(root)
    folder = machine.accelerator.save_state()
    machine.accelerator.wait_for_everyone()
    if not machine.accelerator.is_main_process:
        shutil.rmtree(machine.disk)
        real = copying.write_and_sync
        copying.write_and_sync = lambda path, data, mode: real(path, data[:-1] + bytes([data[-1] ^ 1]), mode)
    machine.accelerator.wait_for_everyone()
    again = Machine(root)
    try:
        again.accelerator.resume("latest")
    except CheckpointError as error:
        return str(error), folder.exists(), [path.name for path in folder.parent.glob(".*")]
    return "resumed", folder.exists(), []


def test_copy_damaged_in_transit_is_not_committed(tmp_path):
    first, second = run_ranks(copy_with_damage, 2, str(tmp_path))
    for error, _, litter in (first, second):
        assert "rank 1: CheckpointDamaged: " in error
        assert litter == []
    assert (first[1], second[1]) == (True, False)
