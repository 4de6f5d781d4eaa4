"""A port that listens where a run needs it, and nowhere else: on loopback for one machine, on one interface for several."""

import errno
import socket

BACKLOG = 4096


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
