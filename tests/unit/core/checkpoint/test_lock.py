"""One run at a time saves into a folder; whoever comes second is told who has it, and a holder that is gone is in nobody's way."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace

import pytest

from headway.core.checkpoint import lock
from headway.core.checkpoint.folders import Locks
from headway.core.checkpoint.lock import LockOwner
from headway.core.checkpoint.stores.folder_lock import FolderLock
from headway.errors import CheckpointError


def written(tmp_path, age=0.0, **fields):
    """A lock as another process has left it, last touched so many seconds ago."""
    path = tmp_path / "checkpoints.lock"
    holder = replace(LockOwner.describe_this_process("theirs", "their start"), **fields)
    path.write_text(json.dumps(asdict(holder)))
    os.utime(path, (time.time() - age,) * 2)
    return path


def take(tmp_path, start="our start"):
    return FolderLock(tmp_path / "checkpoints", "ours", start)


def test_the_lock_file_exists_while_the_lock_is_held(tmp_path):
    held = take(tmp_path)
    told = json.loads((tmp_path / "checkpoints.lock").read_text())
    assert (told["run"], told["pid"]) == ("ours", os.getpid())
    held.check()
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_a_living_owner_on_this_machine_is_named(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        # Long silent, as a suspended one would be: the kernel knows better.
        written(
            tmp_path, 3600, pid=other.pid, born=lock._read_start_time(other.pid), script="theirs.py\x1b[2J", host="here"
        )
        with pytest.raises(CheckpointError, match=rf"run theirs \(theirs\.py\\x1b\[2J, process {other.pid} on here"):
            take(tmp_path)
        other.communicate(b"\n")
    take(tmp_path).release()


@pytest.mark.parametrize("fields", [{"born": "1"}, {"pid": 2**22 + 1}])
def test_a_dead_owner_or_a_reused_process_id_does_not_block_the_lock(fields, tmp_path):
    written(tmp_path, **fields)
    held = take(tmp_path)
    held.check()
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoints.lock"]
    held.release()


def test_an_owner_on_another_machine_is_dead_without_touches(tmp_path, monkeypatch):
    written(tmp_path, 3600, machine="another")
    take(tmp_path).release()
    monkeypatch.setattr(lock, "SILENCE", 2)
    written(tmp_path, machine="another")  # it has died just now
    take(tmp_path).release()


@pytest.mark.parametrize("text", [None, "", "[1]"])
def test_an_owner_on_another_machine_is_alive_while_it_touches_the_lock(text, tmp_path):
    path = written(tmp_path, 1, machine="another", host="node-7")
    if text is not None:
        path.write_text(text)  # not written yet, or not by us
    toucher = threading.Timer(2, os.utime, [path])
    toucher.start()
    with pytest.raises(
        CheckpointError, match="in use by another run" + (": run theirs .* on node-7" if text is None else "")
    ):
        take(tmp_path)
    toucher.join()


def test_machines_of_one_start_that_see_one_folder_have_one_lock(tmp_path):
    path = written(tmp_path, machine="another")
    held = take(tmp_path, "their start")
    held.check()
    held.release()
    assert path.exists()


def test_a_run_that_did_not_touch_its_lock_learns_that_it_was_taken(tmp_path):
    held = take(tmp_path)
    written(tmp_path, machine="another")
    with pytest.raises(CheckpointError, match="was taken by another run while this one did not respond"):
        held.check()
    held.release()
    assert (tmp_path / "checkpoints.lock").exists()


def test_a_deleted_lock_file_is_recreated(tmp_path):
    held = take(tmp_path)
    (tmp_path / "checkpoints.lock").unlink()
    held.check()
    assert (tmp_path / "checkpoints.lock").exists()
    held.release()


def test_objects_of_one_process_share_a_lock(tmp_path):
    locks = Locks()
    locks.hold(tmp_path / "a", "one", "start")
    assert locks.get_start_id(tmp_path / "a") == "start"
    locks.hold(tmp_path / "a", "two", "start")
    locks.release()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_locks_is_warned_about(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    Locks().hold(tmp_path / "file" / "checkpoints", "one", "start")
    assert "cannot be locked" in caplog.text
