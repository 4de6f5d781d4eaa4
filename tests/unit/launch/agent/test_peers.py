"""Test heartbeats between launchers, in one process and over real sockets on loopback."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable

import pytest

from headway.common.sealing import Seal, UnsealedCounter
from headway.launch.agent.peers import PeerMachines


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


def make_seal() -> Seal:
    return Seal(b"of these machines", UnsealedCounter(print))


@pytest.fixture
def three():
    """Connections of three machines, and the events of their losses."""
    lost = [threading.Event() for _ in range(3)]
    peers = [PeerMachines(machine, f"10.0.0.{machine}", 60, lost[machine].set) for machine in range(3)]
    port = peers[0].open_hub("127.0.0.1")
    for machine, one in enumerate(peers):
        assert one.connect("127.0.0.1", port, make_seal(), [2 * machine, 2 * machine + 1]) is None
    yield peers, lost
    for one in peers:
        one.announce_end()


def test_failure_is_sent_to_all_machines_with_its_exit_code(three):
    peers, lost = three
    wait_for(lambda: {each.peer.machine for each in peers[0]._connections.values()} == {1, 2})
    peers[1].announce_end("rank 3 of 6 failed first", 137)
    wait_for(lambda: lost[0].is_set() and lost[2].is_set())
    assert peers[0].lost == peers[2].lost
    assert (
        peers[0].lost
        == f"machine 1 (host {socket.gethostname()}, 10.0.0.1) has ended the run: rank 3 of 6 failed first"
    )
    assert (peers[0].exit_code, peers[2].exit_code, peers[2].has_lost_hub) == (137, 137, False)


def test_orderly_exit_is_no_loss(three):
    peers, lost = three
    wait_for(lambda: {each.peer.machine for each in peers[0]._connections.values()} == {1, 2})
    peers[1].announce_end()
    peers[0].announce_end()
    time.sleep(0.2)
    assert not any(event.is_set() for event in lost)


def test_broken_connection_is_a_loss_at_once(three):
    peers, lost = three
    wait_for(lambda: {each.peer.machine for each in peers[0]._connections.values()} == {1, 2})
    connection = next(iter(peers[2]._connections.values()))
    connection.socket.shutdown(socket.SHUT_RDWR)
    wait_for(lambda: lost[0].is_set() and lost[1].is_set() and lost[2].is_set())
    assert "machine 2 (host" in peers[1].lost
    assert "is gone: its launcher ended without a message" in peers[1].lost
    assert "; ranks 4, 5 were on it" in peers[1].lost
    assert peers[2].has_lost_hub


def test_unreachable_hub_is_reported():
    with socket.socket() as taken:  # bound but not listening, so connections are refused
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        trouble = PeerMachines(1, "", 60, lambda: None).connect("127.0.0.1", port, make_seal(), [1])
    assert trouble is not None
    assert trouble.startswith("machine 0 cannot be reached at 127.0.0.1:")


def test_lost_run_never_exits_with_success(three):
    peers, lost = three
    wait_for(lambda: {each.peer.machine for each in peers[0]._connections.values()} == {1, 2})
    peers[1].announce_end("for no reason", 0)
    wait_for(lambda: lost[0].is_set() and lost[2].is_set())
    assert (peers[0].exit_code, peers[2].exit_code) == (1, 1)


# ---------------------------------------------------------------- messages from outside the run

PROVEN = make_seal()


def forge_message(**content: object) -> bytes:
    return json.dumps(content).encode() + b"\n"


NONE_OF_THIS_RUN = {
    "a port scan": b"GET / HTTP/1.0\r\nHost: machine\r\n\r\n",
    "noise": bytes(range(256)) * 100,
    "a forged loss": forge_message(lost="machine 1 is \x1b[31mgone", exit_code=0),
    "a forged loss after a word": b"0" * 32 + b"\n" + forge_message(lost="machine 1 is gone", exit_code=0),
    "a forged proof": b"0" * 32 + b"\n" + b"0" * 32 + forge_message(lost="machine 1 is gone", exit_code=0),
    "a line for another place": b"0" * 32
    + b"\n"
    + PROVEN.seal_message("here", forge_message(lost="gone", exit_code=0)),
    "a line without an end": b"x" * 100_000,
    "a word without an end": b"0" * 100_000,
}


@pytest.fixture
def hub():
    """Yield the connections of machines 0 and 1, their loss events, the port, and the counter of dropped messages."""
    said, lost = [], [threading.Event(), threading.Event()]
    peers = [PeerMachines(machine, f"10.0.0.{machine}", 60, lost[machine].set) for machine in range(2)]
    port = peers[0].open_hub("127.0.0.1")
    strangers = UnsealedCounter(said.append)
    assert peers[0].connect("127.0.0.1", port, Seal(b"of these machines", strangers), [0]) is None
    assert peers[1].connect("127.0.0.1", port, make_seal(), [1]) is None
    wait_for(lambda: {each.peer.machine for each in peers[0]._connections.values()} == {1})
    yield peers, lost, port, strangers, said
    for one in peers:
        one.announce_end()


@pytest.mark.parametrize("what", NONE_OF_THIS_RUN)
def test_message_from_outside_the_run_is_dropped_counted_and_reported_once(hub, what):
    peers, lost, port, strangers, said = hub
    for number in range(3):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.settimeout(30)
            with contextlib.suppress(ConnectionError):
                connection.sendall(NONE_OF_THIS_RUN[what])
                while connection.recv(4096):  # the hub closes the connection at once
                    pass
        wait_for(lambda number=number: strangers.num_dropped > number)
    assert strangers.num_dropped == 3
    assert len(said) == 1
    assert "from 127.0.0.1 was not sent by a process of this run, so it is dropped" in said[0]
    check_connections(peers, lost)


def check_connections(peers, lost):
    """Check that the hub still sends and receives, and that no loss was reported."""
    time.sleep(0.1)
    assert not any(event.is_set() for event in lost)
    peers[1].send_views([{"rank": 1, "text": "\x1b[2J\n\tfine"}])
    wait_for(lambda: peers[0].get_views())
    assert peers[0].get_views() == [{"rank": 1, "text": "\\x1b[2J\n\tfine"}]


def test_recorded_messages_cannot_be_replayed(hub):
    peers, lost, port, strangers, _ = hub
    heard: list[bytes] = []
    relay = socket.create_server(("127.0.0.1", 0))

    def relay_messages() -> None:
        inner, outer = relay.accept()[0], socket.create_connection(("127.0.0.1", port))
        threading.Thread(target=lambda: [inner.sendall(data) for data in iter(lambda: outer.recv(4096), b"")]).start()
        with contextlib.suppress(ConnectionError):
            for data in iter(lambda: inner.recv(4096), b""):
                heard.append(data)
                outer.sendall(data)

    threading.Thread(target=relay_messages, daemon=True).start()
    third = PeerMachines(2, "10.0.0.2", 60, lambda: None)
    assert third.connect("127.0.0.1", relay.getsockname()[1], make_seal(), [2]) is None
    wait_for(lambda: {each.peer.machine for each in peers[0]._connections.values()} == {1, 2})
    third.announce_end()
    wait_for(lambda: b'"leaving"' in b"".join(heard))
    assert strangers.num_dropped == 0
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"".join(heard))
        wait_for(lambda: strangers.num_dropped == 1)
    check_connections(peers, lost)


def test_unproven_connections_are_dropped_when_there_are_too_many(hub, monkeypatch):
    peers, lost, port, strangers, _ = hub
    monkeypatch.setattr("headway.launch.agent.peers._MOST_UNPROVEN", 8)
    opened = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
    wait_for(lambda: strangers.num_dropped >= 32)
    monkeypatch.setattr("headway.launch.agent.peers._CONNECT_TIMEOUT", 0.0)
    wait_for(lambda: strangers.num_dropped == 40)
    for connection in opened:
        connection.close()
    check_connections(peers, lost)
