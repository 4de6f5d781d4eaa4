"""Tests of the command `headway verify` with real processes: exit codes, JSON, and Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.verify.test_bad_input import LOOP, write_script

SLEEPING = "import time, pathlib\npathlib.Path({mark!r}).write_text('')\ntime.sleep(600)\n"


def start_verify(folder: Path, *args: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "headway.cli.main", "verify", "--cpu", *args],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )


def list_processes(folder: Path) -> list[int]:
    """Return the IDs of the command's processes, which are those whose TMPDIR is the folder."""
    ids = []
    for each in Path("/proc").iterdir():
        if each.name.isdigit() and int(each.name) != os.getpid():
            try:
                is_ours = f"TMPDIR={folder}".encode() in (each / "environ").read_bytes()
                state = (each / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if is_ours and state != "Z":
                ids.append(int(each.name))
    return ids


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads processes from /proc")
@pytest.mark.parametrize("is_running", [False, True], ids=["while_servers_start", "while_the_script_runs"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_all_processes(tmp_path: Path, is_running: bool, number: signal.Signals) -> None:
    mark = tmp_path / "mark"
    write_script(tmp_path, SLEEPING.format(mark=str(mark)))
    process = start_verify(tmp_path, "train.py")
    while not (mark.exists() if is_running else list(tmp_path.glob("headway_verify_*"))):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate()
    assert list_processes(tmp_path) == []
    assert process.returncode == (130 if number == signal.SIGINT else 143), errors
    assert "Traceback" not in errors
    assert not list(tmp_path.glob("headway_verify_*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inside", "only", "code", "message"),
    [
        ("continue", "repeat", 2, "the script ended without an update"),
        ("pass", "out_of_memory", 2, "nothing was checked"),
        ("pass", "repeat", 0, None),
    ],
)
def test_json_contains_the_error(tmp_path: Path, inside: str, only: str, code: int, message: str | None) -> None:
    write_script(tmp_path, LOOP.format(inside=inside))
    process = start_verify(tmp_path, "--json", "--time_limit", "120", "--only", only, "train.py")
    output, errors = process.communicate()
    assert process.returncode == code, errors
    result = json.loads(output)
    assert set(result) == {"error", "seconds", "updates", "notes", "escaped", "proofs"}
    if message is None:
        assert result["error"] is None
    else:
        assert message in result["error"]
        assert message in errors
