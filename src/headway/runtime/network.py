"""This machine on the network: by which address and interface others reach it, the host name's loopback trap, where it listens.

A port listens where a run needs it, and nowhere else: on loopback for one machine, on one interface for several.
"""

import errno
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses that no machine has (RFC 5737, RFC 3849): the way there is the default route. No packet is sent."""

_PATIENT = 3.0
"""Seconds that an unknown name is waited for in silence."""

_WITHOUT_OTHERS = ("docker", "br-", "virbr", "veth", "cni", "flannel", "lxc", "podman")
"""How interfaces begin that lead to this machine's own containers."""


BACKLOG = 4096


@dataclass(frozen=True)
class Interface:
    """A network interface that is up.

    Attributes:
        name: as `ip link` shows it.
        addresses: its IPv4 and IPv6 addresses, without a scope.
    """

    name: str
    addresses: tuple[str, ...]

    @property
    def is_loopback(self) -> bool:
        """Does it lead to this machine only?"""
        return any(is_loopback(address) for address in self.addresses)


def interfaces() -> list[Interface]:
    """The interfaces that are up and have an address, loopback first."""
    import psutil

    states = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        addresses = tuple(
            entry.address.partition("%")[0]
            for entry in entries
            if entry.family in (socket.AF_INET, socket.AF_INET6) and not entry.address.startswith("fe80")
        )
        state = states.get(name)
        if addresses and state is not None and state.isup:
            found.append(Interface(name, addresses))
    return sorted(found, key=lambda one: not one.is_loopback)


def address_towards(host: str, port: int = 1) -> str | None:
    """This machine's address on the way to `host`; None where there is no way. No packet is sent."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def own_address(host: str = "", port: int = 1) -> str | None:
    """The address by which other machines reach this one.

    Args:
        host: where the machines meet; the address on the way there counts, unless it is a loopback one, as it is on
            machine 0 where its own name stands for 127.0.1.1.
        port: any port of `host`.

    Returns:
        The address towards `host`, else on the default route, else of the first interface that leads anywhere; None
        where there is none.
    """
    for target in (host, *_ELSEWHERE):
        address = address_towards(target, port) if target else None
        if address is not None and not is_loopback(address):
            return address
    candidates = [one for one in interfaces() if not one.is_loopback]
    outward = [one for one in candidates if not one.name.startswith(_WITHOUT_OTHERS)]
    return next((one.addresses[0] for one in (*outward, *candidates)), None)


def interface_of(address: str) -> str | None:
    """The name of the interface that has `address`; None where none has it."""
    return next((one.name for one in interfaces() if address in one.addresses), None)


def name_leads_to(host: str) -> tuple[str, ...]:
    """The addresses that this machine finds for `host`; empty where it finds none."""
    try:
        return tuple(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(host, 1, type=socket.SOCK_STREAM)))
    except OSError:
        return ()


def is_trap(host: str) -> bool:
    """Is `host`, a name of this machine's, of no use to others: unknown, or this machine's loopback address?"""
    addresses = name_leads_to(host)
    return not addresses or any(map(is_loopback, addresses))


def wait_for_name(host: str, seconds: float, say: Callable[[str], None]) -> None:
    """Wait until the name of machine 0 is known here, as a pod's is once it runs; say so where it takes a while.

    Raises:
        ConnectionError: it is not known in time.
    """
    begun, has_said = time.monotonic(), False
    while not name_leads_to(host):
        waited = time.monotonic() - begun
        if waited > seconds:
            raise ConnectionError(f"the name {host!r} leads nowhere from {socket.gethostname()}; give its address")
        if waited > _PATIENT and not has_said:
            has_said = True
            say(
                f"headway: {socket.gethostname()} cannot resolve {host!r}, where the machines meet, and keeps trying for "
                f"{seconds:g} s; give an address that all machines know (--main_process_ip)"
            )
        time.sleep(0.5)


def name_for_others(hostname: str) -> str:
    """What another machine can call this one: its name, or its address where the name would lead each to itself."""
    return (own_address() or hostname) if is_trap(hostname) else hostname


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def is_loopback(address: str) -> bool:
    """Is it an address by which a machine reaches itself only?"""
    return address in ("localhost", "::1") or address.startswith(("127.", "::ffff:127."))


def listen(host: str, port: int = 0) -> socket.socket:
    """Listen at an address of this machine.

    Args:
        host: the address, as those that connect know it. Where it is no address of this machine's, such as that of a service
            before it, or a name that leads this machine to itself only, all interfaces listen.
        port: 0 for any free one.

    Raises:
        OSError: the port is taken or not allowed.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    for family, _, _, _, address in found:
        if is_loopback(str(address[0])) and not is_loopback(host):
            continue
        try:
            return socket.create_server(address, family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=has_both, backlog=BACKLOG)
