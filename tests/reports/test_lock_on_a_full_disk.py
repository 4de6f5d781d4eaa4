"""Tests of a checkpoint folder's lock on a full disk: it is written completely or not at all, and damaged ones expire."""

import os
import subprocess
import sys
import time

import pytest

from headway.core.checkpoint.stores import folder_lock
from headway.core.checkpoint.stores.folder_lock import FolderLock
from headway.errors import CheckpointError

FULL = """
import resource, sys
from pathlib import Path
from headway.core.checkpoint.folders import HeldLocks
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
HeldLocks().lock_folder(Path(sys.argv[1], "checkpoints"), "theirs", "their start")
print(sorted(each.name for each in Path(sys.argv[1]).iterdir()))
"""


def take_lock(folder):
    return FolderLock(folder / "checkpoints", "ours", "our start")


def write_lock(text, age, folder):
    path = folder / "checkpoints.lock"
    path.write_text(text)
    os.utime(path, (time.time() - age,) * 2)
    return path


@pytest.mark.parametrize("room", [0, 100])
@pytest.mark.parametrize("has_links", [True, False])
def test_failed_write_leaves_no_lock(room, has_links, tmp_path):
    code = (
        FULL
        if has_links
        else f"import errno, os\ndef link(*args): raise OSError(errno.EPERM, 'no links')\nos.link = link\n{FULL}"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(room)], capture_output=True, text=True, timeout=60
    )
    assert result.stdout.strip() == "[]", result.stderr
    assert "cannot be locked" in result.stderr
    take_lock(tmp_path).release()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk requires root")
def test_full_disk_leaves_no_lock(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting is not permitted on this machine")
    try:
        (disk / "data").write_bytes(b"x" * 65536)
        with pytest.raises(OSError, match="No space left"):
            take_lock(disk)
        assert [each.name for each in disk.iterdir()] == ["data"]
        (disk / "data").unlink()
        lock = take_lock(disk)
        lock.check()
        lock.release()
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_empty_lock_is_removed_after_a_short_wait(tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(folder_lock.time, "sleep", waits.append)
    write_lock("", 1.9, tmp_path)
    monkeypatch.setattr(folder_lock, "_read_disk_clock", lambda path, clock=iter(range(100)): time.time() + next(clock))
    lock = take_lock(tmp_path)
    assert sum(waits) <= 3
    lock.check()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_damaged_lock_is_named_and_expires(tmp_path, monkeypatch, caplog):
    write_lock('{"run": "theirs", "st', 3600, tmp_path)
    take_lock(tmp_path).release()
    path = write_lock('{"run": "theirs", "st', 0, tmp_path)
    monkeypatch.setattr(folder_lock.time, "sleep", lambda seconds: os.utime(path))
    with pytest.raises(CheckpointError, match=r"checkpoints.lock names no run \(21 bytes long, as after a full disk\)"):
        take_lock(tmp_path)
    assert "names no run" in caplog.text


def test_old_temporary_files_of_killed_processes_are_removed(tmp_path):
    old, new = tmp_path / ".checkpoints.lock-1111", tmp_path / ".checkpoints.lock-2222"
    for path in (old, new):
        path.touch()
    os.utime(old, (time.time() - 3600,) * 2)
    take_lock(tmp_path).release()
    assert [each.name for each in tmp_path.iterdir()] == [new.name]
