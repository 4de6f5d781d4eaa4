"""Authenticated connection between two agents, on which each message is one line of text.

Each side first sends a random word (nonce). Every later line carries a MAC, keyed by the run's secret, over both words
and the line's direction and number. So a line cannot be forged, changed, replayed or reflected. A connection that begins
differently is closed.
"""

import json
import re
import secrets
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from headway.common.sealing import Seal
from headway.common.untrusted import escape_json

_NONCE = re.compile(rb"[0-9a-f]{32}")
_LONGEST_UNPROVEN, _LONGEST = 1 << 12, 1 << 24
"""Maximum length of a line in bytes, before and after the connection has authenticated."""


@dataclass
class PeerMachine:
    """State of another machine of the run, as reported by its agent.

    Attributes:
        machine: Rank of the machine.
        unit: Word for a machine in messages: "machine", or "task" if each process has its own launcher.
        host: Host name.
        address: Address of the machine.
        ranks: Global ranks of the processes on the machine.
        heard: Time of the machine's last heartbeat, on this process's monotonic clock.
        is_leaving: Whether the machine has announced its end, or counts as lost.
        views: States of the machine's ranks (`RankView` as dicts), for the hang watch.
    """

    machine: int
    unit: str = "machine"
    host: str = ""
    address: str = ""
    ranks: tuple[int, ...] = ()
    heard: float = 0.0
    is_leaving: bool = False
    views: list[dict[str, Any]] = field(default_factory=list)

    def format_name(self) -> str:
        """Return this machine's name for messages, with its host and address if they are known."""
        known = ", ".join(part for part in (f"host {self.host}" if self.host else "", self.address) if part)
        return f"{self.unit} {self.machine}" + (f" ({known})" if known else "")

    def describe_ranks(self) -> str:
        """Return a phrase that lists the ranks on this machine. Empty if they are unknown."""
        if not self.ranks:
            return ""
        word = "ranks" if len(self.ranks) > 1 else "rank"
        return f"; {word} {', '.join(map(str, self.ranks))} {'were' if len(self.ranks) > 1 else 'was'} on it"


class PeerConnection:
    """Nonblocking connection to another agent, on which each message is one authenticated line of text.

    Args:
        connection_socket: Socket of the connection.
        peer: State of the machine at the other end. Incomplete until the machine has authenticated itself.
        seal: Object that computes and checks HMACs with the run's secret.
        is_hub: Whether this end is on machine 0.

    Attributes:
        is_proven: Whether the other end has authenticated itself by sending a line with a valid MAC.
        open_time: Time at which the connection was opened, on this process's monotonic clock.
        unsent: Bytes that the other end has not accepted yet.
    """

    def __init__(self, connection_socket: socket.socket, peer: PeerMachine, seal: Seal, is_hub: bool) -> None:
        connection_socket.setblocking(False)
        self.socket = connection_socket
        self.peer = peer
        self.is_proven = False
        self.open_time = time.monotonic()
        self._seal = seal
        self._is_hub = is_hub
        self._own_nonce = secrets.token_hex(16)
        # Nonces of both ends, the hub's first. Empty until the other end has sent its nonce. They are part of each MAC, so
        # that a line from another connection is not accepted.
        self._nonces = ""
        self._num_sent = 0  # lines
        self._num_received = 0
        self._incomplete_line = b""  # received bytes after the last line break
        self.unsent = b""
        self._send_bytes(self._own_nonce.encode() + b"\n")

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, **content: object) -> None:
        """Send a message as one line. Machine 0 sends nothing until the other side has authenticated.

        Args:
            content: Fields of the message. A message without fields is a heartbeat.
        """
        if self.is_proven or not self._is_hub:
            data = json.dumps(content).encode() if content else b""
            self._send_bytes(self._seal.seal_message(self._describe_line(self._is_hub, self._num_sent), data) + b"\n")
            self._num_sent += 1

    def _send_bytes(self, data: bytes) -> None:
        """Send bytes without blocking. The rest is kept in `unsent`, and sent before the bytes of the next call."""
        data = self.unsent + data
        try:
            self.unsent = data[self.socket.send(data) :]
        except BlockingIOError:  # the other side does not read its socket
            self.unsent = data
        except OSError:  # the connection is broken, which the next read reports
            self.unsent = b""

    def _describe_line(self, is_hub: bool, number: int) -> str:
        """Return the text that identifies a line in its MAC, so that a recorded line cannot be sent again.

        Args:
            is_hub: Whether machine 0 sends the line.
            number: Number of lines that its sender has sent before on this connection.
        """
        return f"line {self._nonces} {'from' if is_hub else 'to'} the hub {number}"

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the messages received, and whether the connection must be closed.

        It must be closed if the other side has closed it, does not belong to this run, or sent a line that is too long.
        """
        try:
            data = self.socket.recv(65536)
        except BlockingIOError:
            return [], False
        except OSError:
            return [], True
        *lines, self._incomplete_line = (self._incomplete_line + data).split(b"\n")
        messages = []
        for line in lines:
            if not self._nonces:
                if not self._accept_nonce(line):
                    return [], True
                continue
            content = self._open_line(line)
            if content is not None:
                messages.append(escape_json(json.loads(content or b"{}")))
            elif not self.is_proven:
                return [], True
        is_too_long = len(self._incomplete_line) > (_LONGEST if self.is_proven else _LONGEST_UNPROVEN)
        if is_too_long:
            self._seal.unsealed_counter.count_message(
                f"a line of more than {len(self._incomplete_line) - 1} bytes from {self._describe_origin()}"
            )
        return messages, is_too_long or not data

    def _accept_nonce(self, line: bytes) -> bool:
        """Accept the nonce (a random number) that the other side sends as its first line.

        Returns:
            Whether the line contains a valid nonce.
        """
        if _NONCE.fullmatch(line) is None:
            self.count_stranger()
            return False
        other_nonce = line.decode()
        hub_nonce, machine_nonce = (self._own_nonce, other_nonce) if self._is_hub else (other_nonce, self._own_nonce)
        self._nonces = f"{hub_nonce} {machine_nonce}"
        return True

    def _open_line(self, line: bytes) -> bytes | None:
        """Return the content of a received line, or None if its MAC is not valid. A valid line counts as a heartbeat."""
        content = self._seal.open_message(self._describe_line(not self._is_hub, self._num_received), line)
        if content is None:
            self._seal.unsealed_counter.count_message(f"a line from {self._describe_origin()}")
            return None
        self._num_received += 1
        self.is_proven = True
        self.peer.heard = time.monotonic()
        return content

    def count_stranger(self) -> None:
        """Count this connection as one that did not authenticate itself."""
        self._seal.unsealed_counter.count_message(f"a connection from {self._describe_origin()}")

    def _describe_origin(self) -> str:
        """Return the address of the other end of the connection, for messages."""
        try:
            return str(self.socket.getpeername()[0])
        except OSError:
            return "a connection that is gone"

    def wait_for_nonce(self, seconds: float) -> bool:
        """Wait for the nonce (a random number) that the other side sends as its first line.

        Args:
            seconds: Maximum time to wait.

        Returns:
            Whether a valid nonce has arrived within this time.
        """
        self.socket.settimeout(seconds)
        try:
            line = self.socket.makefile("rb", buffering=0).readline(33)
        except OSError:
            return False
        finally:
            self.socket.setblocking(False)
        return self._accept_nonce(line.rstrip(b"\n"))
