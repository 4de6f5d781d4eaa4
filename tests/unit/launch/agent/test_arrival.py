"""Test waiting for machines: messages and their times, names of missing machines, and the error for a port in use."""

import math
import os
import socket
import threading

import pytest
from torch.distributed import HashStore

from headway.common.sealing import Seal, UnsealedCounter
from headway.core.runtime.control_plane.sealed_store import SealedStore
from headway.errors import LaunchError
from headway.launch.agent import arrival, rendezvous_wait
from headway.launch.agent.arrival import RendezvousWatch, wait_for_all, wait_for_host
from headway.launch.agent.ports import describe_taken_port, is_port_taken
from headway.launch.agent.rendezvous_wait import RendezvousWait, call_in_time


def make_store() -> SealedStore:
    """Return a store within this process."""
    return SealedStore(HashStore(), "meeting", Seal(b"", UnsealedCounter(print)))


@pytest.fixture
def printed_lines(monkeypatch):
    """Make waits print their first message at once, and return an empty list for the printed lines."""
    monkeypatch.setattr(rendezvous_wait, "FIRST_MESSAGE", 0.0)
    return []


def test_messages_are_printed_at_once_and_then_rarely(monkeypatch):
    now, lines = [0.0], []
    monkeypatch.setattr(rendezvous_wait.time, "monotonic", lambda: now[0])
    waiting = RendezvousWait(lines.append, 2000, "--timeout")
    for second in range(2000):
        now[0] = float(second)
        waiting.print_if_due(f"at {second}")
    assert [line.partition(",")[0] for line in lines] == [
        f"headway: at {second}" for second in (2, 30, 120, 300, 600, 900, 1200, 1500, 1800)
    ]
    assert not waiting.is_over
    now[0] = 2001.0
    assert waiting.is_over
    assert "(2000 s: --timeout)" in lines[0]


def test_waiting_may_be_unlimited(printed_lines):
    waiting = RendezvousWait(printed_lines.append, math.inf, "--timeout")
    waiting.print_if_due("one waits")
    assert printed_lines == ["headway: one waits, for as long as it takes (--timeout)"]
    assert not waiting.is_over


def test_missing_machines_are_named(printed_lines):
    store = make_store()
    arrival.record_arrival(store, 2)
    with pytest.raises(
        LaunchError, match=r"the 4 machines did not meet at h:1: machines 1, 3 did not come within 0.1 s \(--timeout"
    ):
        wait_for_all(store, 0, 4, RendezvousWait(printed_lines.append, 0.1, "--timeout"), "h:1", "machine")
    assert printed_lines[0].startswith("headway: machine 0 of 4 waits at h:1 for machines 1, 3, until ")
    threading.Timer(0.3, lambda: [arrival.record_arrival(store, number) for number in (1, 3)]).start()
    wait_for_all(store, 0, 4, RendezvousWait(printed_lines.append, 30, "--timeout"), "h:1", "machine")
    assert printed_lines[-1] == "headway: all 4 machines are there"


def test_machines_that_arrive_in_time_print_nothing():
    store, lines = make_store(), []
    arrival.record_arrival(store, 1)
    wait_for_all(store, 0, 2, RendezvousWait(lines.append, 30, "--timeout"), "h:1", "machine")
    assert lines == []


def test_port_is_waited_for(printed_lines):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        with pytest.raises(
            LaunchError, match=f"machine 0 did not open 127.0.0.1:{port} within 0.1 s .*connection refused"
        ):
            wait_for_host("127.0.0.1", port, RendezvousWait(printed_lines.append, 0.1, "--timeout"), "machine 1 of 2")
        assert "machine 1 of 2 waits for machine 0 to open" in printed_lines[0]
        probe.listen()
        wait_for_host("127.0.0.1", port, RendezvousWait(printed_lines.append, 30, "--timeout"), "machine 1 of 2")


def test_call_that_does_not_return_is_given_up(printed_lines):
    never = threading.Event()
    with pytest.raises(LaunchError, match="too late"):
        call_in_time(never.wait, RendezvousWait(printed_lines.append, 0.1, "--timeout"), "it takes long", "too late")
    assert printed_lines[0].startswith("headway: it takes long, until ")
    never.set()
    assert call_in_time(lambda: 7, RendezvousWait(printed_lines.append, 5, "--timeout"), "", "") == 7
    with pytest.raises(ZeroDivisionError):
        call_in_time(lambda: 1 / 0, RendezvousWait(printed_lines.append, 5, "--timeout"), "", "")


def test_watch_reports_while_another_rendezvous_waits(printed_lines):
    store, told = make_store(), threading.Event()
    watch = RendezvousWatch(
        lambda: store,
        1,
        3,
        RendezvousWait(lambda line: (printed_lines.append(line), told.set()), 9, "--timeout"),
        "h:1",
        "task",
    )
    assert told.wait(30)
    watch.stop()
    assert printed_lines[0].startswith("headway: task 1 of 3 waits at h:1 for tasks 0, 2, until ")
    assert watch.describe_late().startswith("the 3 tasks did not meet at h:1: tasks 0, 2 did not come within 9 s")


def test_holder_of_a_port_is_named():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        assert f"port {port} of this machine is taken by " in describe_taken_port(port, 4711)
        assert f"(pid {os.getpid()}: " in describe_taken_port(port, 4711)
    assert describe_taken_port(port, 4711).startswith(
        f"port {port} of this machine is taken; end that program, or choose another port on all"
    )
    assert "--main_process_port 4711, which is free" in describe_taken_port(port, 4711)


def test_error_of_a_port_in_use_is_recognized():
    inner = RuntimeError(
        "The server socket has failed to listen. code: -98, name: EADDRINUSE, message: address already in use"
    )
    outer = RuntimeError("The connection to the C10d store has failed.")
    outer.__cause__ = inner
    assert is_port_taken(inner)
    assert is_port_taken(outer)
    assert not is_port_taken(RuntimeError("timed out"))
