"""Test network addresses, names, and the interfaces on which a port listens."""

import socket

import pytest

from headway.core.runtime import network
from headway.core.runtime.network import is_loopback, open_listener


def make_resolver(*addresses: str):
    """Return a stand-in for `socket.getaddrinfo` that returns these addresses."""
    return lambda host, port, **more: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in addresses]


def test_loopback_stays_loopback():
    for host in ("127.0.0.1", "localhost", "127.8.9.10"):
        with open_listener(host) as listener:
            assert is_loopback(listener.getsockname()[0])


@pytest.mark.parametrize("addresses", [
    ("127.0.1.1",),  # Debian's address for a machine's own name
    ("192.0.2.1",),  # address of a service that forwards to this machine
    (),
])  # fmt: skip
def test_name_without_an_address_of_this_machine_listens_everywhere(monkeypatch, addresses):
    monkeypatch.setattr(network.socket, "getaddrinfo", make_resolver(*addresses))
    with open_listener("machine") as listener:
        assert listener.getsockname()[0] in ("::", "0.0.0.0")
        monkeypatch.undo()
        socket.create_connection(("127.0.0.1", listener.getsockname()[1])).close()


def test_first_address_of_this_machine_is_used(monkeypatch):
    monkeypatch.setattr(
        network, "is_loopback", lambda address: False
    )  # treat the second address as one of another interface
    monkeypatch.setattr(network.socket, "getaddrinfo", make_resolver("192.0.2.1", "127.0.0.9"))
    with open_listener("machine") as listener:
        assert listener.getsockname()[0] == "127.0.0.9"


def test_occupied_port_is_an_error():
    with open_listener("127.0.0.1") as first, pytest.raises(OSError, match="in use"):
        open_listener("127.0.0.1", first.getsockname()[1])
