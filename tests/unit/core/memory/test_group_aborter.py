"""Test the thread that aborts a process group whose engine waits for its peers. The group and the control plane are stubs."""

import threading
import time

from headway.core.memory.group_aborter import GroupAborter
from headway.core.runtime import process
from headway.core.runtime.control_plane import control


class StubControlPlane:
    """Stub of the control plane for one process: every key exists, and every count is 1."""

    world_size = 1

    def has_key(self, key):
        return True

    def count(self, key):
        return 1


def test_main_thread_waits_until_an_abort_is_complete(monkeypatch):
    """torch first forgets the default group, then stops its threads, and clears its records of groups at the end."""
    is_forgotten, is_over = threading.Event(), threading.Event()

    def abort():
        is_forgotten.set()
        time.sleep(0.5)
        is_over.set()

    monkeypatch.setattr(process, "does_exit_block_peers", lambda: not is_forgotten.is_set())
    monkeypatch.setattr(process, "has_control_link", lambda: True)
    monkeypatch.setattr(process, "abort_group", abort)
    monkeypatch.setattr(control, "current", StubControlPlane)
    alarm = GroupAborter("out_of_memory/0")
    alarm.start()
    try:
        assert is_forgotten.wait(10)
        alarm.wait()
        assert is_over.is_set()
    finally:
        alarm.stop()
