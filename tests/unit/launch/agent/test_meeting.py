"""Waiting for machines: what is said and when, who is named, and what a taken port is answered with."""

import math
import os
import socket
import threading

import pytest
from torch.distributed import HashStore

from headway.common.untrusted import Seal, UnsealedCounter
from headway.errors import LaunchError
from headway.launch.agent import rendezvous
from headway.launch.agent.rendezvous import (
    RendezvousWait,
    RendezvousWatch,
    in_time,
    is_taken,
    knock,
    taken,
    wait_for_all,
)
from headway.runtime.control_plane.store import SealedStore


def a_store() -> SealedStore:
    """A store within this process."""
    return SealedStore(HashStore(), "meeting", Seal(b"", UnsealedCounter(print)))


@pytest.fixture
def said(monkeypatch):
    """The lines; the first one comes at once."""
    monkeypatch.setattr(rendezvous, "FIRST", 0.0)
    return []


def test_it_is_said_at_once_and_then_sparingly(monkeypatch):
    now, lines = [0.0], []
    monkeypatch.setattr(rendezvous.time, "monotonic", lambda: now[0])
    waiting = RendezvousWait(lines.append, 2000, "--timeout")
    for second in range(2000):
        now[0] = float(second)
        waiting.tell(f"at {second}")
    assert [line.partition(",")[0] for line in lines] == [
        f"headway: at {second}" for second in (2, 30, 120, 300, 600, 900, 1200, 1500, 1800)
    ]
    assert not waiting.is_over
    now[0] = 2001.0
    assert waiting.is_over
    assert "(2000 s: --timeout)" in lines[0]


def test_for_ever(said):
    waiting = RendezvousWait(said.append, math.inf, "--timeout")
    waiting.tell("one waits")
    assert said == ["headway: one waits, for as long as it takes (--timeout)"]
    assert not waiting.is_over


def test_who_has_not_come_is_named(said):
    store = a_store()
    rendezvous.arrive(store, 2)
    with pytest.raises(
        LaunchError, match=r"the 4 machines did not meet at h:1: machines 1, 3 did not come within 0.1 s \(--timeout"
    ):
        wait_for_all(store, 0, 4, RendezvousWait(said.append, 0.1, "--timeout"), "h:1", "machine")
    assert said[0].startswith("headway: machine 0 of 4 waits at h:1 for machines 1, 3, until ")
    threading.Timer(0.3, lambda: [rendezvous.arrive(store, number) for number in (1, 3)]).start()
    wait_for_all(store, 0, 4, RendezvousWait(said.append, 30, "--timeout"), "h:1", "machine")
    assert said[-1] == "headway: all 4 machines are there"


def test_those_who_come_in_time_say_nothing():
    store, lines = a_store(), []
    rendezvous.arrive(store, 1)
    wait_for_all(store, 0, 2, RendezvousWait(lines.append, 30, "--timeout"), "h:1", "machine")
    assert lines == []


def test_a_port_is_waited_for(said):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        with pytest.raises(
            LaunchError, match=f"machine 0 did not open 127.0.0.1:{port} within 0.1 s .*connection refused"
        ):
            knock("127.0.0.1", port, RendezvousWait(said.append, 0.1, "--timeout"), "machine 1 of 2")
        assert "machine 1 of 2 waits for machine 0 to open" in said[0]
        probe.listen()
        knock("127.0.0.1", port, RendezvousWait(said.append, 30, "--timeout"), "machine 1 of 2")


def test_a_call_that_does_not_come_back_is_given_up(said):
    never = threading.Event()
    with pytest.raises(LaunchError, match="too late"):
        in_time(never.wait, RendezvousWait(said.append, 0.1, "--timeout"), "it takes long", "too late")
    assert said[0].startswith("headway: it takes long, until ")
    never.set()
    assert in_time(lambda: 7, RendezvousWait(said.append, 5, "--timeout"), "", "") == 7
    with pytest.raises(ZeroDivisionError):
        in_time(lambda: 1 / 0, RendezvousWait(said.append, 5, "--timeout"), "", "")


def test_a_watch_beside_an_engines_own_wait(said):
    store, told = a_store(), threading.Event()
    watch = RendezvousWatch(
        lambda: store,
        1,
        3,
        RendezvousWait(lambda line: (said.append(line), told.set()), 9, "--timeout"),
        "h:1",
        "task",
    )
    assert told.wait(30)
    watch.end()
    assert said[0].startswith("headway: task 1 of 3 waits at h:1 for tasks 0, 2, until ")
    assert watch.late().startswith("the 3 tasks did not meet at h:1: tasks 0, 2 did not come within 9 s")


def test_who_holds_a_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        assert f"port {port} of this machine is taken by " in taken(port, 4711)
        assert f"(pid {os.getpid()}: " in taken(port, 4711)
    assert taken(port, 4711).startswith(
        f"port {port} of this machine is taken; end that program, or choose another port on all"
    )
    assert "--main_process_port 4711, which is free" in taken(port, 4711)


def test_an_engines_error_is_understood():
    inner = RuntimeError(
        "The server socket has failed to listen. code: -98, name: EADDRINUSE, message: address already in use"
    )
    outer = RuntimeError("The connection to the C10d store has failed.")
    outer.__cause__ = inner
    assert is_taken(inner)
    assert is_taken(outer)
    assert not is_taken(RuntimeError("timed out"))
