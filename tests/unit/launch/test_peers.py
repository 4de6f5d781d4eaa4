"""Launchers that hear of one another: here in one process, over real sockets on loopback."""

import socket
import threading
import time
from collections.abc import Callable

import pytest

from headway.launch.peers import Peers


class Meeting:
    """The store at which the launchers have met."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes:
        return self._values[key].encode()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


@pytest.fixture
def three():
    store, lost = Meeting(), [threading.Event() for _ in range(3)]
    peers = [Peers(machine, f"10.0.0.{machine}", 60, lost[machine].set) for machine in range(3)]
    for machine, one in enumerate(peers):
        assert one.meet(store, "127.0.0.1", [2 * machine, 2 * machine + 1]) is None
    yield peers, lost
    for one in peers:
        one.leave()


def test_a_failure_is_told_to_all_with_its_exit_code(three):
    peers, lost = three
    wait_for(lambda: {line.peer.machine for line in peers[0]._lines.values()} == {1, 2})
    peers[1].leave("rank 3 of 6 failed first", 137)
    wait_for(lambda: lost[0].is_set() and lost[2].is_set())
    assert peers[0].lost == peers[2].lost
    assert (
        peers[0].lost
        == f"machine 1 (host {socket.gethostname()}, 10.0.0.1) has ended the run: rank 3 of 6 failed first"
    )
    assert (peers[0].exit_code, peers[2].exit_code, peers[2].has_lost_hub) == (137, 137, False)


def test_leaving_in_order_is_no_loss(three):
    peers, lost = three
    wait_for(lambda: {line.peer.machine for line in peers[0]._lines.values()} == {1, 2})
    peers[1].leave()
    peers[0].leave()
    time.sleep(0.2)
    assert not any(event.is_set() for event in lost)


def test_a_broken_connection_is_a_loss_at_once(three):
    peers, lost = three
    wait_for(lambda: {line.peer.machine for line in peers[0]._lines.values()} == {1, 2})
    line = next(iter(peers[2]._lines.values()))
    line.connection.shutdown(socket.SHUT_RDWR)
    wait_for(lambda: lost[0].is_set() and lost[1].is_set() and lost[2].is_set())
    assert "machine 2 (host" in peers[1].lost
    assert "is gone: its launcher ended without a word" in peers[1].lost
    assert "; ranks 4, 5 were on it" in peers[1].lost
    assert peers[2].has_lost_hub


def test_a_hub_that_cannot_be_reached_is_said():
    store = Meeting()
    with socket.socket() as taken:  # bound and not listening: refused
        taken.bind(("127.0.0.1", 0))
        store.set("headway/peers", str(taken.getsockname()[1]))
        trouble = Peers(1, "", 60, lambda: None).meet(store, "127.0.0.1", [1])
    assert trouble is not None
    assert trouble.startswith("machine 0 cannot be reached at 127.0.0.1:")
