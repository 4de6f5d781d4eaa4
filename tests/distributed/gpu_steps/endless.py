"""A step that never ends, with a process in a session of its own."""

import subprocess
import sys
import time

from benchmarks.gpu.bench import Bench, Row


def run(bench: Bench) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    bench.row(Row("process", sleeper.pid))
    time.sleep(600)
