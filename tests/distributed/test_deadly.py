"""`get_exit_code` reads a process's exit code without reaping the process."""

import subprocess
import sys

from headway.launch.agent.processes import get_exit_code


def test_exit_code_is_read_without_reaping_the_process():
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(3)"], stdin=subprocess.PIPE
    )
    assert get_exit_code(process) is None
    process.stdin.close()
    while (code := get_exit_code(process)) is None:
        pass
    assert code == 3
    assert process.returncode is None
    assert process.wait() == 3
    assert get_exit_code(process) == 3


def test_exit_code_after_a_signal_is_negative():
    process = subprocess.Popen(["sleep", "600"])
    process.kill()
    while (code := get_exit_code(process)) is None:
        pass
    assert code == -9
    process.wait()
