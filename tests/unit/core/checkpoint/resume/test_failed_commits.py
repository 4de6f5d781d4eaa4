"""Test saves that fail just before or just after their commit is confirmed."""

import json
import os
import signal
import threading
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from headway.core.checkpoint import folders
from headway.core.checkpoint.format.manifest import read_manifest
from headway.core.checkpoint.loading.files import verify_checkpoint
from headway.core.checkpoint.lock import LockOwner
from headway.core.checkpoint.saving import writer
from headway.core.checkpoint.stores import disk
from headway.errors import CheckpointError
from tests.unit.core.checkpoint.resume.test_methods import build, list_names


@pytest.fixture(autouse=True)
def _run_in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("is_exchange", [False, True])
def test_rename_without_confirmation_by_the_disk_is_undone(is_exchange, monkeypatch):
    """After the error, the new checkpoint does not exist and the earlier one is unchanged."""
    accelerator, model, *_ = build(automatic_checkpoint_naming=False)
    before = accelerator.save_state("one")
    target = before if is_exchange else Path("two").absolute()
    hashed = read_manifest(before).sha256
    with torch.no_grad():
        model.weight.add_(1)
    real, failed = disk.sync_folder, []

    def fail_once(folder):
        if folder == before.parent and not failed:
            failed.append(folder)
            raise OSError(5, "Input/output error", str(folder))
        real(folder)

    monkeypatch.setattr(disk, "sync_folder", fail_once)
    with pytest.raises(CheckpointError, match="was not saved"):
        accelerator.save_state(target)
    assert failed
    assert verify_checkpoint(before).sha256 == hashed
    assert is_exchange or not target.exists()
    assert verify_checkpoint(accelerator.save_state(target)).sha256 != hashed


def save_and_wait(accelerator, blocking):
    accelerator.save_state(blocking=blocking)
    accelerator.wait_for_save()


@pytest.mark.parametrize("blocking", [True, False])
def test_pipe_created_by_a_hook_fails_the_save_without_hanging(blocking):
    def raise_on_alarm(*_):
        raise AssertionError("the save hangs")

    accelerator, *_ = build()
    kept = accelerator.save_state()
    hook = accelerator.register_save_state_pre_hook(lambda models, weights, folder: os.mkfifo(Path(folder, "odd")))
    before = signal.signal(signal.SIGALRM, raise_on_alarm)
    signal.alarm(60)
    try:
        with pytest.raises(CheckpointError, match="odd is a pipe, not a regular file"):
            save_and_wait(accelerator, blocking)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert [path for path in kept.parent.iterdir() if path.name.startswith(".staging")] == []
    verify_checkpoint(kept)
    hook.remove()
    verify_checkpoint(accelerator.save_state())


def test_unreadable_older_checkpoints_do_not_fail_a_save(monkeypatch, caplog):
    accelerator, *_ = build(total_limit=1)
    accelerator.save_state()
    with monkeypatch.context() as patch:
        patch.setattr(folders, "remove_old_checkpoints", lambda *args: os.listdir("nowhere"))
        verify_checkpoint(accelerator.save_state())
    assert "older checkpoints could not be listed" in caplog.text
    accelerator.save_state()
    assert list_names() == ["checkpoint_2", "latest"]


@pytest.mark.parametrize("blocking", [True, False])
def test_commit_after_another_run_has_taken_the_lock_fails(blocking):
    """A process that was suspended during a save does not replace the checkpoint of the run that took its lock."""
    accelerator, *_ = build()
    kept = accelerator.save_state()
    hashed = read_manifest(kept).sha256
    lock = kept.parent.with_name("checkpoints.lock")
    taken = json.dumps(asdict(LockOwner.describe_this_process("theirs", "their start")))
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: lock.write_text(taken))
    with pytest.raises(CheckpointError, match="was taken by another run while this one did not respond"):
        save_and_wait(accelerator, blocking)
    assert list_names() == ["checkpoint_0", "latest"]
    assert read_manifest(kept).sha256 == hashed
    assert lock.read_text() == taken


@pytest.mark.parametrize("trains_on", [False, True])
def test_lock_is_released_when_a_background_save_ends(trains_on, monkeypatch):
    accelerator, *_ = build()
    folder = accelerator.save_state()
    lock = folder.parent.with_name("checkpoints.lock")
    real, may_write = writer.write_checkpoint, threading.Event()

    def write_later(*args):
        assert may_write.wait(60)
        return real(*args)

    monkeypatch.setattr(writer, "write_checkpoint", write_later)
    accelerator.save_state(blocking=False)
    accelerator.stop_watching()
    assert lock.exists()  # the save needs it
    if trains_on:
        accelerator._checkpoints._lock.acquire_before_training()
    may_write.set()
    accelerator.wait_for_save()
    assert lock.exists() == trains_on
    assert list_names() == ["checkpoint_0", "checkpoint_1", "latest"]
    accelerator.stop_watching()
    assert not lock.exists()
