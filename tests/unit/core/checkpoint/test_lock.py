"""Test the lock that lets only one run save into a folder: a running owner is named, and a dead one does not block it."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace

import pytest

from headway.core.checkpoint import lock
from headway.core.checkpoint.folders import HeldLocks
from headway.core.checkpoint.lock import LockOwner
from headway.core.checkpoint.stores.folder_lock import FolderLock
from headway.errors import CheckpointError


def write_lock(tmp_path, age=0.0, **fields):
    """Write a lock file as another process would, and return its path.

    Args:
        tmp_path: Folder of the lock.
        age: Seconds since the owner last touched the file.
        fields: Fields of `LockOwner` that differ from those of this process.
    """
    path = tmp_path / "checkpoints.lock"
    holder = replace(LockOwner.describe_this_process("theirs", "their start"), **fields)
    path.write_text(json.dumps(asdict(holder)))
    os.utime(path, (time.time() - age,) * 2)
    return path


def take_lock(tmp_path, start="our start"):
    return FolderLock(tmp_path / "checkpoints", "ours", start)


def test_lock_file_exists_while_the_lock_is_held(tmp_path):
    held = take_lock(tmp_path)
    content = json.loads((tmp_path / "checkpoints.lock").read_text())
    assert (content["run"], content["pid"]) == ("ours", os.getpid())
    held.check()
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_living_owner_on_this_machine_is_named(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        # Not touched for an hour, like the lock of a suspended process. The kernel knows that the process lives.
        write_lock(
            tmp_path, 3600, pid=other.pid, born=lock._read_start_time(other.pid), script="theirs.py\x1b[2J", host="here"
        )
        with pytest.raises(CheckpointError, match=rf"run theirs \(theirs\.py\\x1b\[2J, process {other.pid} on here"):
            take_lock(tmp_path)
        other.communicate(b"\n")
    take_lock(tmp_path).release()


@pytest.mark.parametrize("fields", [{"born": "1"}, {"pid": 2**22 + 1}])
def test_dead_owner_or_reused_process_id_does_not_block_the_lock(fields, tmp_path):
    write_lock(tmp_path, **fields)
    held = take_lock(tmp_path)
    held.check()
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoints.lock"]
    held.release()


def test_owner_on_another_machine_is_dead_without_touches(tmp_path, monkeypatch):
    write_lock(tmp_path, 3600, machine="another")
    take_lock(tmp_path).release()
    monkeypatch.setattr(lock, "SILENCE", 2)
    write_lock(tmp_path, machine="another")  # the owner has just died
    take_lock(tmp_path).release()


@pytest.mark.parametrize("text", [None, "", "[1]"])
def test_owner_on_another_machine_is_alive_while_it_touches_the_lock(text, tmp_path):
    path = write_lock(tmp_path, 1, machine="another", host="node-7")
    if text is not None:
        path.write_text(text)  # not written yet, or written by another program
    toucher = threading.Timer(2, os.utime, [path])
    toucher.start()
    with pytest.raises(
        CheckpointError, match="in use by another run" + (": run theirs .* on node-7" if text is None else "")
    ):
        take_lock(tmp_path)
    toucher.join()


def test_machines_of_one_start_that_see_one_folder_share_a_lock(tmp_path):
    path = write_lock(tmp_path, machine="another")
    held = take_lock(tmp_path, "their start")
    held.check()
    held.release()
    assert path.exists()


def test_run_that_did_not_touch_its_lock_is_told_that_it_was_taken(tmp_path):
    held = take_lock(tmp_path)
    write_lock(tmp_path, machine="another")
    with pytest.raises(CheckpointError, match="was taken by another run while this one did not respond"):
        held.check()
    held.release()
    assert (tmp_path / "checkpoints.lock").exists()


def test_deleted_lock_file_is_recreated(tmp_path):
    held = take_lock(tmp_path)
    (tmp_path / "checkpoints.lock").unlink()
    held.check()
    assert (tmp_path / "checkpoints.lock").exists()
    held.release()


def test_objects_of_one_process_share_a_lock(tmp_path):
    locks = HeldLocks()
    locks.lock_folder(tmp_path / "a", "one", "start")
    assert locks.get_start_id(tmp_path / "a") == "start"
    locks.lock_folder(tmp_path / "a", "two", "start")
    locks.release()
    assert list(tmp_path.iterdir()) == []


def test_disk_without_locks_causes_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    HeldLocks().lock_folder(tmp_path / "file" / "checkpoints", "one", "start")
    assert "cannot be locked" in caplog.text
