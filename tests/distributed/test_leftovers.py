import os
import signal
import subprocess
import sys

import pytest

from headway.launch.agent.processes import end_sessions, list_session_members
from tests.distributed.test_launch import wait_until_gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

LEADER = "sleep 600 & a=$!; trap '' TERM; sleep 600 & b=$!; kill -STOP $a; echo $a $b > pids"


def test_what_a_rank_leaves_is_ended_also_where_it_is_stopped_or_deaf(tmp_path):
    leader = subprocess.Popen(["sh", "-c", LEADER], cwd=tmp_path, start_new_session=True)
    assert leader.wait(30) == 0
    stopped, deaf = map(int, (tmp_path / "pids").read_text().split())
    assert sorted(list_session_members([leader.pid])) == sorted([stopped, deaf])
    assert list_session_members([os.getpid() + 10**7]) == []
    assert end_sessions([leader.pid], 0.2) == [deaf]
    assert wait_until_gone([stopped, deaf]) == []


def test_others_are_left_alone():
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        assert end_sessions([os.getpid() + 10**7], 0.1) == []
        assert other.poll() is None
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
