"""The launcher ends processes that a rank leaves behind, even if they are stopped or ignore SIGTERM."""

import os
import signal
import subprocess
import sys

import pytest

from headway.launch.agent.processes import end_sessions, list_session_members
from tests.distributed.test_launch import wait_until_gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

LEADER = "sleep 600 & a=$!; trap '' TERM; sleep 600 & b=$!; kill -STOP $a; echo $a $b > pids"


def test_stopped_and_unresponsive_processes_of_a_session_are_ended(tmp_path):
    leader = subprocess.Popen(["sh", "-c", LEADER], cwd=tmp_path, start_new_session=True)
    assert leader.wait(30) == 0
    stopped, unresponsive = map(int, (tmp_path / "pids").read_text().split())
    assert sorted(list_session_members([leader.pid])) == sorted([stopped, unresponsive])
    assert list_session_members([os.getpid() + 10**7]) == []
    assert end_sessions([leader.pid], 0.2) == [unresponsive]
    assert wait_until_gone([stopped, unresponsive]) == []


def test_processes_of_other_sessions_are_left_alone():
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        assert end_sessions([os.getpid() + 10**7], 0.1) == []
        assert other.poll() is None
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
