"""Test the server that forks the runs of `headway verify`."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headway.verify import server

SCRIPT = """
import os, time
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(120)
"""


def test_folders_of_pythonpath_are_searched_first_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first folder stays first even if it is the server's working directory, which is first in `sys.path` already."""
    monkeypatch.setattr(sys, "path", ["/here", "/library"])
    server._prepend_search_paths(os.pathsep.join(["/here", "/other"]))
    assert sys.path[:2] == ["/here", "/other"]


@pytest.mark.slow
def test_client_sees_the_end_of_a_killed_server_while_a_child_of_a_rank_runs(tmp_path: Path) -> None:
    """A child of a rank outlives the server, and would keep a copy of the pipe for the answers open."""
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, "-m", "headway.verify.server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert json.loads(process.stdout.readline()) == {"is_ready": True}
    output = tmp_path / "output.txt"
    order = {
        "id": 1,
        "variables": dict(os.environ),
        "program": ["script", "script.py"],
        "num_processes": 1,
        "output": str(output),
        "folder": str(tmp_path),
    }
    process.stdin.write(json.dumps(order) + "\n")
    process.stdin.flush()
    limit = time.monotonic() + 60
    while not (output.exists() and output.read_text().strip().isdigit()):
        assert time.monotonic() < limit, output.read_text() if output.exists() else "the rank did not start"
        time.sleep(0.05)
    child = int(output.read_text())
    try:
        process.kill()
        assert select.select([process.stdout], [], [], 20)[0], "the pipe is still open"
        assert process.stdout.read() == ""
        os.kill(child, 0)  # the child still runs
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        process.wait()
