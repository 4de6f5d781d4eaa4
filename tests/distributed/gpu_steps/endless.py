"""Benchmark step that never ends and starts a process in a new session."""

import subprocess
import sys
import time

from benchmarks.gpu.bench import Bench, Row


def run(bench: Bench) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    bench.add_row(Row("process", sleeper.pid))
    time.sleep(600)
