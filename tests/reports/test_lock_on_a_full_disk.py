"""The lock of a checkpoints' folder on a full disk: whole or not at all, and a torn one is in nobody's way for long."""

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
from headway.core.checkpoint.folders import Locks
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
Locks().hold(Path(sys.argv[1], "checkpoints"), "theirs", "their start")
print(sorted(each.name for each in Path(sys.argv[1]).iterdir()))
"""


def take(folder):
    return FolderLock(folder / "checkpoints", "ours", "our start")


def left_by(text, age, folder):
    path = folder / "checkpoints.lock"
    path.write_text(text)
    os.utime(path, (time.time() - age,) * 2)
    return path


@pytest.mark.parametrize("room", [0, 100])
@pytest.mark.parametrize("has_links", [True, False])
def test_no_lock_is_left_where_it_could_not_be_written(room, has_links, tmp_path):
    code = (
        FULL
        if has_links
        else f"import errno, os\ndef link(*args): raise OSError(errno.EPERM, 'no links')\nos.link = link\n{FULL}"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(room)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr
    assert "cannot be locked" in done.stderr
    take(tmp_path).release()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")
def test_a_full_disk_leaves_no_lock_and_no_wait(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount")
    try:
        (disk / "data").write_bytes(b"x" * 65536)
        with pytest.raises(OSError, match="No space left"):
            take(disk)
        assert [each.name for each in disk.iterdir()] == ["data"]
        (disk / "data").unlink()
        held = take(disk)
        held.check()
        held.release()
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_an_empty_lock_of_before_is_taken_away_in_moments(tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(folder_lock.time, "sleep", waits.append)
    left_by("", 1.9, tmp_path)
    monkeypatch.setattr(folder_lock, "_read_disk_clock", lambda path, clock=iter(range(100)): time.time() + next(clock))
    held = take(tmp_path)
    assert sum(waits) <= 3
    held.check()
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_a_torn_lock_names_itself_and_goes_by_its_age(tmp_path, monkeypatch, caplog):
    left_by('{"run": "theirs", "st', 3600, tmp_path)
    take(tmp_path).release()
    path = left_by('{"run": "theirs", "st', 0, tmp_path)
    monkeypatch.setattr(folder_lock.time, "sleep", lambda seconds: os.utime(path))
    with pytest.raises(CheckpointError, match=r"checkpoints.lock names no run \(21 bytes long, as after a full disk\)"):
        take(tmp_path)
    assert "names no run" in caplog.text


def test_what_a_killed_process_has_left_beside_the_lock_goes(tmp_path):
    old, new = tmp_path / ".checkpoints.lock-1111", tmp_path / ".checkpoints.lock-2222"
    for path in (old, new):
        path.touch()
    os.utime(old, (time.time() - 3600,) * 2)
    take(tmp_path).release()
    assert [each.name for each in tmp_path.iterdir()] == [new.name]
