"""Test that files written outside the temporary folder are named, even if a script reaches them through a link."""

import subprocess
import sys

from headway.verify.request import RunRequest
from headway.verify.runs import _COPIED_BYTES, get_working_folder, mirror_working_folder

_SCRIPT = """
import os, sys
from pathlib import Path
from headway.verify.escapes import EscapeWatch

watch = EscapeWatch(Path(sys.argv[1]))
Path("small.txt").write_text("new")
Path("made.txt").write_text("new")
os.remove("large.bin")
Path("folder/in_link.txt").write_text("new")
print("\\n".join(watch.list_files()))
"""


def test_link_to_the_users_folder_does_not_hide_a_write(tmp_path, monkeypatch):
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    (home / "folder").mkdir(parents=True)
    (home / "small.txt").write_text("old")
    (home / "large.bin").write_bytes(bytes(_COPIED_BYTES + 1))
    (home / "runs").mkdir()
    monkeypatch.chdir(home)
    request = RunRequest(name="baseline", folder=str(scratch / "records"), output=str(scratch / "output"))
    mirror_working_folder(request)
    folder = get_working_folder(request)
    assert not (folder / "runs").exists()
    command = [sys.executable, "-c", _SCRIPT, str(scratch)]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.split()
    assert result == [str((home / "folder" / "in_link.txt").resolve())]
    assert (home / "small.txt").read_text() == "old"
    assert (home / "large.bin").exists()
