import subprocess
import sys

from headway.launch.agent.processes import get_exit_code


def test_an_exit_code_is_seen_without_being_taken():
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


def test_a_signals_number_is_negative():
    process = subprocess.Popen(["sleep", "600"])
    process.kill()
    while (code := get_exit_code(process)) is None:
        pass
    assert code == -9
    process.wait()
