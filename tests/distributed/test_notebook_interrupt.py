"""A notebook process is interrupted or killed while its ranks wait: the prompt returns, and no rank remains."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

NOTEBOOK = """
from headway import debug_launcher

def train():
    import os, time
    from headway import Accelerator
    accelerator = Accelerator()
    os.write(1, b"a rank is here\\n")
    if accelerator.process_index == 0:
        time.sleep(3600)
    accelerator.wait_for_everyone()

try:
    debug_launcher(train)
except KeyboardInterrupt:
    print("the prompt is back", flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux notifies a process of its parent's death")
@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda pid: os.killpg(pid, signal.SIGINT), id="interrupt"),
        pytest.param(lambda pid: os.kill(pid, signal.SIGKILL), id="kernel killed"),
    ],
)
def test_ranks_end_with_the_cell(tmp_path: Path, end: Callable[[int], None]) -> None:
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    # Background jobs of a shell ignore SIGINT, and so do their child processes, unlike those of a Jupyter kernel.
    former_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    notebook = subprocess.Popen([sys.executable, "notebook.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True,
                                start_new_session=True)  # fmt: skip
    signal.signal(signal.SIGINT, former_handler)
    assert notebook.stdout is not None
    started: list[psutil.Process] = []
    try:
        for _ in range(2):
            while "a rank is here" not in (line := notebook.stdout.readline()):
                assert line
        started = psutil.Process(notebook.pid).children(recursive=True)
        assert len(started) == 3  # an agent and two ranks
        end(notebook.pid)
        notebook.wait(60)
        _, alive = psutil.wait_procs(started, timeout=60)
        assert [process.cmdline() for process in alive] == []
        if notebook.returncode == 0:
            assert "the prompt is back" in notebook.stdout.read()
        else:
            assert notebook.returncode == -signal.SIGKILL
    finally:
        for process in started:
            if process.is_running():
                process.kill()
        notebook.kill()
        notebook.wait()
