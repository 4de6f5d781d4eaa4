"""Launchers and ranks killed at random moments, from the first import to the middle of a run, leave no process behind.

`HEADWAY_KILLS=50 pytest tests/distributed/test_random_kills.py` runs the long version.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

NUM_KILLS = int(os.environ.get("HEADWAY_KILLS", "5"))
AT_ONCE = 5


def start_launch(folder: Path) -> subprocess.Popen[bytes]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    return subprocess.Popen([sys.executable, "-m", "headway", "launch", "--cpu", "-n", "2", "train.py"], cwd=folder,
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=kept)  # fmt: skip


def list_processes(pid: int) -> list[psutil.Process]:
    try:
        launcher = psutil.Process(pid)
        return [launcher, *launcher.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux notifies a process of its parent's death")
def test_no_process_outlives_a_launch_after_a_kill(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\ntime.sleep(3600)\n")
    draw = random.Random(4711)
    for done in range(0, NUM_KILLS, AT_ONCE):
        launches = [start_launch(tmp_path) for _ in range(min(AT_ONCE, NUM_KILLS - done))]
        started: list[psutil.Process] = []
        try:
            # Three in four are killed while running, the others during startup.
            moments = [draw.uniform(0, 2) if draw.random() < 0.25 else None for _ in launches]
            for launch, moment in zip(launches, moments):
                deadline = time.monotonic() + (60 if moment is None else moment)
                while len(list_processes(launch.pid)) < 3 and time.monotonic() < deadline:
                    time.sleep(0.05)
                members = list_processes(launch.pid)
                started += members
                draw.choice(members).send_signal(draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
            for launch in launches:
                assert launch.wait(60) != 0
            _, alive = psutil.wait_procs(started, timeout=30)
            assert [process.cmdline() for process in alive] == []
        finally:
            for process in [*started, *(member for launch in launches for member in list_processes(launch.pid))]:
                if process.is_running():
                    process.kill()
            for launch in launches:
                launch.wait(10)
