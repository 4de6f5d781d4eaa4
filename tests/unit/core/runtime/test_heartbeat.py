"""Test the heartbeat thread: stacks of the main thread, the end of the program, forks, and dumps while C code runs."""

import os
import subprocess
import sys
import threading
import time

import pytest

from headway.core.runtime import heartbeat_file
from headway.core.runtime.flight_recorder import FlightRecorder
from headway.core.runtime.heartbeat import ENDED, Heartbeat


def run_code(body, path, **more):
    """Run code in a new process that writes its heartbeat to `path`."""
    return subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "HEADWAY_PULSE": str(path), **more})  # fmt: skip


@pytest.fixture
def path(tmp_path):
    """Path of an empty heartbeat file."""
    found = tmp_path / "rank0.pulse"
    heartbeat_file.create_file(found)
    return found


def test_heartbeat_records_the_stack_of_the_main_thread():
    own = heartbeat_file.HeartbeatFile()
    beating = Heartbeat(own, FlightRecorder())
    done = threading.Event()

    def write_beat_in_thread():
        beating.write_beat()
        done.set()

    threading.Thread(target=write_beat_in_thread).start()
    assert done.wait(10)
    found = own.read()
    assert found.num_beats == 1
    assert abs(time.monotonic() - found.last_beat) < 10
    assert any(name == "test_heartbeat_records_the_stack_of_the_main_thread" for _, _, name in found.note["stack"])
    assert found.note["torch"] in ([], None)


def test_end_of_the_program_is_recorded_without_a_crash(path):
    body = (
        "from headway.core.runtime import heartbeat\nimport sys, time\nheartbeat.INTERVAL = 0.001\nheartbeat.start_heartbeat()\n"
        "heartbeat.start_heartbeat()\ntime.sleep(0.2)\nsys.exit(3)\n"
    )
    ran = run_code(body, path)
    assert (ran.returncode, ran.stderr) == (3, "")
    found = heartbeat_file.HeartbeatFile(path, is_writer=False).read()
    assert found.phase == ENDED
    assert found.num_beats > 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forks_during_heartbeats_do_not_write(path):
    body = """
import os, time
from headway.core.runtime import heartbeat_file
from headway.core.runtime import heartbeat
heartbeat.INTERVAL = 0.0001
heartbeat.start_heartbeat()
for _ in range(30):
    child = os.fork()
    if child == 0:
        heartbeat_file.get_own_file().note_progress(99, 99)  # not the rank's
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
print("done")
"""
    ran = run_code(body, path)
    assert ran.stdout == "done\n", ran.stderr
    assert heartbeat_file.HeartbeatFile(path, is_writer=False).read().update == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forked_worker_ends_without_waiting(path):
    """A data loader's worker ends like any Python process, although the recorder's lock was held during the fork."""
    body = """
import os, signal, threading
from headway.core.runtime import heartbeat_file
from headway.core.runtime.heartbeat import Heartbeat
from headway.core.runtime.heartbeat import FlightRecorder
recorder = FlightRecorder()
Heartbeat(heartbeat_file.get_own_file(), recorder).start()
with recorder._is_requested._cond:
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        threading._shutdown()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
print(repr(heartbeat_file.get_own_file().read().phase))
"""
    ran = run_code(body, path)
    assert ran.stdout == "''\n", ran.stderr


def test_stack_is_dumped_while_c_code_holds_the_interpreter(path):
    from headway.core.runtime.heartbeat import STACK_DUMP_SIGNAL
    from headway.launch.watch.stacks import parse_main_stack

    if STACK_DUMP_SIGNAL is None:
        pytest.skip("this system has no signal to spare")
    body = "from headway.core.runtime import heartbeat\nheartbeat.start_heartbeat()\ndef busy():\n    sum(range(10**13))\nbusy()\n"
    process = subprocess.Popen([sys.executable, "-c", body], env={**os.environ, "HEADWAY_PULSE": str(path)})
    try:
        stacks, deadline = path.with_name(path.name + ".stacks"), time.monotonic() + 30
        reader = heartbeat_file.HeartbeatFile(path, is_writer=False)
        while not reader.read().note.get("live") and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        os.kill(process.pid, STACK_DUMP_SIGNAL)
        while not stacks.read_text().count("busy") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [frame.function for frame in parse_main_stack(stacks.read_text())][:2] == ["busy", "<module>"]
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
