"""Network addresses of this machine, host names that resolve to loopback, and listening sockets.

A port is opened only on the interface that needs it: loopback in a run on one machine, one network interface in a run
on several machines.
"""

import errno
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

_REMOTE_ADDRESSES = ("192.0.2.1", "2001:db8::1")
"""Addresses that no machine has (RFC 5737, RFC 3849), used to find the default route without sending a packet."""

_REPORT_DELAY = 3.0
"""Seconds to wait for an unknown host name before a message is printed."""

_CONTAINER_PREFIXES = ("docker", "br-", "virbr", "veth", "cni", "flannel", "lxc", "podman")
"""Name prefixes of network interfaces that lead only to containers on this machine."""


BACKLOG = 4096
"""Maximum number of connections that wait to be accepted, because all ranks can connect at the same time."""


@dataclass(frozen=True)
class Interface:
    """Active network interface of this machine.

    Attributes:
        name: Name as shown by `ip link`.
        addresses: IPv4 and IPv6 addresses. A scope ID (the part after "%") is removed from IPv6 addresses.
    """

    name: str
    addresses: tuple[str, ...]

    @property
    def is_loopback(self) -> bool:
        """Whether the interface reaches only this machine."""
        return any(is_loopback(address) for address in self.addresses)


def list_interfaces() -> list[Interface]:
    """Return the network interfaces that are up and have an address that is not link-local, loopback first."""
    import psutil

    states = psutil.net_if_stats()
    interfaces = []
    for name, entries in psutil.net_if_addrs().items():
        addresses = tuple(
            entry.address.partition("%")[0]
            for entry in entries
            if entry.family in (socket.AF_INET, socket.AF_INET6) and not entry.address.startswith("fe80")
        )
        state = states.get(name)
        if addresses and state is not None and state.isup:
            interfaces.append(Interface(name, addresses))
    return sorted(interfaces, key=lambda interface: not interface.is_loopback)


def find_address_towards(host: str, port: int = 1) -> str | None:
    """Return this machine's address on the route to `host`, or None if there is no route. No packet is sent.

    Args:
        host: Name or address of the other machine.
        port: Any port number. Default: 1.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def find_own_address(host: str = "", port: int = 1) -> str | None:
    """Return the address by which other machines reach this one.

    Args:
        host: Host of the rendezvous. Default: "", for none.
        port: Any port number. Default: 1.

    Returns:
        The first of these addresses that exists: this machine's address on the route to `host`, its address on the
            default route, the address of a network interface that leads to other machines, or the address of one that
            leads only to containers. None if none exists. Loopback addresses are skipped, for example on machine 0 if
            its own name resolves to 127.0.1.1.
    """
    for target in (host, *_REMOTE_ADDRESSES):
        address = find_address_towards(target, port) if target else None
        if address is not None and not is_loopback(address):
            return address
    candidates = [interface for interface in list_interfaces() if not interface.is_loopback]
    outward = [interface for interface in candidates if not interface.name.startswith(_CONTAINER_PREFIXES)]
    return next((interface.addresses[0] for interface in (*outward, *candidates)), None)


def find_interface(address: str) -> str | None:
    """Return the name of the network interface that has `address`, or None if there is no such interface."""
    return next((interface.name for interface in list_interfaces() if address in interface.addresses), None)


def resolve_name(host: str) -> tuple[str, ...]:
    """Return the distinct IP addresses that this machine resolves `host` to; empty if the name is unknown."""
    try:
        return tuple(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(host, 1, type=socket.SOCK_STREAM)))
    except OSError:
        return ()


def is_loopback_name(host: str) -> bool:
    """Whether other machines cannot reach this machine by the name `host`.

    True if the name is unknown or resolves to a loopback address.
    """
    addresses = resolve_name(host)
    return not addresses or any(map(is_loopback, addresses))


def wait_for_name(host: str, seconds: float, report: Callable[[str], None]) -> None:
    """Wait until the host name of machine 0 can be resolved. A pod's name, for example, is unknown until the pod runs.

    Args:
        host: Name to resolve.
        seconds: Maximum time to wait.
        report: Function that prints a message. It is called once if the name is still unknown after three seconds.

    Raises:
        ConnectionError: If the name cannot be resolved within `seconds`.
    """
    start, has_reported = time.monotonic(), False
    while not resolve_name(host):
        waited = time.monotonic() - start
        if waited > seconds:
            raise ConnectionError(f"the name {host!r} cannot be resolved on {socket.gethostname()}; give its address")
        if waited > _REPORT_DELAY and not has_reported:
            has_reported = True
            report(
                f"headway: {socket.gethostname()} cannot resolve {host!r}, where the machines meet, and keeps trying for "
                f"{seconds:g} s; give an address that all machines know (--main_process_ip)"
            )
        time.sleep(0.5)


def choose_name_for_others(hostname: str) -> str:
    """Return the name or address by which other machines reach this one.

    The result is `hostname` if the name resolves to an address that other machines can reach. Otherwise it is this
    machine's own address, or `hostname` if no address is found.

    Args:
        hostname: Host name of this machine.
    """
    return (find_own_address() or hostname) if is_loopback_name(hostname) else hostname


def find_free_port() -> int:
    """Return a port that no process listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def is_loopback(address: str) -> bool:
    """Whether an address or host name reaches only the machine itself."""
    return address in ("localhost", "::1") or address.startswith(("127.", "::ffff:127."))


def open_listener(host: str, port: int = 0) -> socket.socket:
    """Open a listening socket at an address of this machine.

    Args:
        host: Address or host name that clients use. The socket listens on all interfaces in two cases: this machine
            does not have the address, for example because it belongs to a load balancer, or the name resolves only to
            loopback addresses.
        port: Port to listen on; 0 for any free port.

    Raises:
        OSError: If the port is taken or not allowed.
    """
    try:
        candidates = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        candidates = []
    for family, _, _, _, address in candidates:
        if is_loopback(str(address[0])) and not is_loopback(host):
            continue
        try:
            return socket.create_server(address, family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    has_dual_stack = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_dual_stack else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=has_dual_stack, backlog=BACKLOG)
