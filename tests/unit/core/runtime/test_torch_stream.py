"""Test reading and writing torch's RNG state in several threads at once, and during a fork."""

import subprocess
import sys

import pytest

CODE = """
import gc, sys, threading
from headway.core.runtime import seed

sys.setswitchinterval(1e-6)
gc.set_threshold(1, 1, 1)  # what a collection in the middle of a read runs gives the interpreter up


class Cyclic:
    def __init__(self):
        self.me = self

    def __del__(self):
        sum(range(200))


def read():
    for _ in range(2000):
        Cyclic()
        seed.write_torch_rng_state(seed.read_torch_rng_state())


threads = [threading.Thread(target=read) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("read")
"""


@pytest.mark.slow
def test_threads_that_read_at_once_do_not_deadlock() -> None:
    """torch's own functions deadlock in this test."""
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120)
    assert result.stdout == "read\n", result.stderr


@pytest.mark.slow
def test_worker_forked_during_a_read_does_not_wait() -> None:
    code = """
import os
from headway.core.runtime import seed

with seed._TORCH_RNG_LOCK:
    child = os.fork()
    if child == 0:
        seed.read_torch_rng_state()
        os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "7\n", result.stderr
