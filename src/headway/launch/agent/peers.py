"""Heartbeats between the launchers' agents, which detect lost machines.

The heartbeats need neither the rendezvous store nor the workers. The agent of machine 0 is the hub. It listens on a
free port, which the other agents receive at the rendezvous. Each of them keeps one connection to the hub and sends one
line per second. The hub answers, and reports the machines that it has lost. So a cut link, a stopped machine and a dead
machine are detected within `timeout`, whereas a communication library's timeouts take minutes. If a link is cut, the
machines on both sides end their ranks. The agents use plain TCP, because a call to a store whose machine is cut off
might never return.

Each side of a connection first sends a random word (nonce). Every later line carries a MAC, keyed by the run's
secret, over both words and the line's direction and number. So a line cannot be forged, changed, replayed or
reflected. A connection that begins differently is closed.
"""

import contextlib
import json
import math
import re
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from headway.common.sealing import Seal
from headway.common.untrusted import escape_json
from headway.core.runtime.network import open_listener

HEARTBEAT_INTERVAL = 1.0
"""Seconds between two heartbeats."""

_CONNECT_TIMEOUT = 10.0
"""Maximum seconds for connecting to machine 0's port and authenticating there.

If a firewall blocks the port, the run continues without heartbeats.
"""

_MOST_UNPROVEN = 256
"""Maximum number of connections that have not authenticated yet. If there are more, the oldest one is closed."""

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


class _PeerConnection:
    """Nonblocking connection to another agent, on which each message is one authenticated line of text.

    Args:
        connection: Socket of the connection.
        peer: State of the machine at the other end. Incomplete until the machine has authenticated itself.
        seal: Object that computes and checks HMACs with the run's secret.
        is_hub: Whether this end is on machine 0.

    Attributes:
        is_proven: Whether the other end has authenticated itself by sending a line with a valid MAC.
        begun: Time at which the connection was opened, on this process's monotonic clock.
        unsent: Bytes that the other end has not accepted yet.
    """

    def __init__(self, connection: socket.socket, peer: PeerMachine, seal: Seal, is_hub: bool) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.peer = peer
        self.is_proven = False
        self.begun = time.monotonic()
        self._seal = seal
        self._is_hub = is_hub
        self._word = secrets.token_hex(16)
        self._words = ""
        self._num_said = 0
        self._num_heard = 0
        self._rest = b""
        self.unsent = b""
        self._send_bytes(self._word.encode() + b"\n")

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, **content: object) -> None:
        """Send a message as one line. Machine 0 sends nothing until the other side has authenticated.

        Args:
            content: Fields of the message. A message without fields is a heartbeat.
        """
        if self.is_proven or not self._is_hub:
            data = json.dumps(content).encode() if content else b""
            self._send_bytes(self._seal.seal_message(self._describe_line(self._is_hub, self._num_said), data) + b"\n")
            self._num_said += 1

    def _send_bytes(self, data: bytes) -> None:
        data = self.unsent + data
        try:
            self.unsent = data[self.connection.send(data) :]
        except BlockingIOError:  # the other side does not read its socket
            self.unsent = data
        except OSError:  # the connection is broken, which the next read reports
            self.unsent = b""

    def _describe_line(self, is_hub: bool, number: int) -> str:
        return f"line {self._words} {'from' if is_hub else 'to'} the hub {number}"

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the messages received, and whether the connection must be closed.

        It must be closed if the other side has closed it, does not belong to this run, or sent a line that is too long.
        """
        try:
            data = self.connection.recv(65536)
        except BlockingIOError:
            return [], False
        except OSError:
            return [], True
        *lines, self._rest = (self._rest + data).split(b"\n")
        messages = []
        for line in lines:
            if not self._words:
                if not self._accept_nonce(line):
                    return [], True
            elif (content := self._open_line(line)) is not None:
                messages.append(escape_json(json.loads(content or b"{}")))
            elif not self.is_proven:
                return [], True
        is_too_long = len(self._rest) > (_LONGEST if self.is_proven else _LONGEST_UNPROVEN)
        if is_too_long:
            self._seal.unsealed_counter.count_message(
                f"a line of more than {len(self._rest) - 1} bytes from {self._describe_origin()}"
            )
        return messages, is_too_long or not data

    def _accept_nonce(self, line: bytes) -> bool:
        """Accept the random word (nonce) that the other side sends as its first line.

        Returns:
            Whether the line contains a valid word.
        """
        if _NONCE.fullmatch(line) is None:
            self.note_stranger()
            return False
        other = line.decode()
        self._words = f"{self._word} {other}" if self._is_hub else f"{other} {self._word}"
        return True

    def _open_line(self, line: bytes) -> bytes | None:
        content = self._seal.open_message(self._describe_line(not self._is_hub, self._num_heard), line)
        if content is None:
            self._seal.unsealed_counter.count_message(f"a line from {self._describe_origin()}")
            return None
        self._num_heard += 1
        self.is_proven = True
        self.peer.heard = time.monotonic()
        return content

    def note_stranger(self) -> None:
        """Count this connection as one that did not authenticate itself."""
        self._seal.unsealed_counter.count_message(f"a connection from {self._describe_origin()}")

    def _describe_origin(self) -> str:
        try:
            return str(self.connection.getpeername()[0])
        except OSError:
            return "a connection that is gone"

    def wait_for_nonce(self, seconds: float) -> bool:
        """Wait for the random word (nonce) that the other side sends as its first line.

        Args:
            seconds: Maximum time to wait.

        Returns:
            Whether a valid word has arrived within this time.
        """
        self.connection.settimeout(seconds)
        try:
            line = self.connection.makefile("rb", buffering=0).readline(33)
        except OSError:
            return False
        finally:
            self.connection.setblocking(False)
        return self._accept_nonce(line.rstrip(b"\n"))


class PeerMachines:
    """This machine's connections to the other machines, used to exchange heartbeats and to detect lost machines.

    Args:
        machine: Rank of this machine; 0 is the hub.
        address: Address by which the other machines reach this one.
        timeout: Seconds without a heartbeat after which a machine counts as lost.
        on_loss: Function that is called after `lost` has been set, at most once per start of the ranks. It is called on
            a background thread.
        unit: Word for a machine in messages: "machine", or "task" if each process has its own launcher.

    Attributes:
        lost: Sentence that names the machine that is lost, or has ended the run after a failure. None if there is none.
        has_lost_hub: Whether the lost machine is machine 0, which hosts the rendezvous.
        exit_code: Exit code of the run after a loss, never 0. If another machine ended the run after a failure, it is
            that machine's exit code.
    """

    def __init__(
        self, machine: int, address: str, timeout: float, on_loss: Callable[[], None], unit: str = "machine"
    ) -> None:
        self._me = PeerMachine(machine, unit, socket.gethostname(), address)
        self._timeout = timeout
        self._on_loss = on_loss
        self._lines: dict[int, _PeerConnection] = {}
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._seal: Seal | None = None
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch_peers, name="peers", daemon=True)
        self.lost: str | None = None
        self.has_lost_hub = False
        self.exit_code = 1

    def open_hub(self, host: str) -> int:
        """Listen for connections from the other machines, if this is machine 0.

        Args:
            host: Address by which the other machines reach machine 0.

        Returns:
            Port on which machine 0 listens. 0 on other machines.
        """
        if self._me.machine == 0 and self._listener is None:
            self._listener = open_listener(host)
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ)
        return int(self._listener.getsockname()[1]) if self._listener is not None else 0

    def connect(self, host: str, port: int, seal: Seal, ranks: Sequence[int]) -> str | None:
        """Connect to machine 0 after a rendezvous, and start exchanging heartbeats.

        Args:
            host: Address of machine 0.
            port: Port that machine 0 listens on.
            seal: Object that computes and checks HMACs with the run's secret.
            ranks: Global ranks on this machine.

        Returns:
            Reason why heartbeats cannot be exchanged with machine 0. None if they can.
        """
        self._me.ranks = tuple(ranks)
        self.lost = None
        self._seal = seal
        if self._me.machine and 0 not in self._lines:
            try:
                connection = socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT)
            except OSError as error:
                return f"machine 0 cannot be reached at {host}:{port} ({error.strerror or error})"
            line = _PeerConnection(
                connection, PeerMachine(0, self._me.unit, address=host, heard=time.monotonic()), seal, False
            )
            if not line.wait_for_nonce(_CONNECT_TIMEOUT):
                connection.close()
                return f"machine 0 does not answer at {host}:{port}"
            self._add_connection(line)
        with self._lock:
            for line in self._lines.values():
                self._send_hello(line)
        if self._thread.ident is None:
            self._thread.start()
        return None

    def announce_end(self, why: str = "", exit_code: int = 0) -> None:
        """Announce to the other machines that this machine ends, and stop exchanging heartbeats.

        Args:
            why: Failure that ended this machine's ranks, after which the other machines end theirs. Empty if the ranks
                ended well.
            exit_code: Exit code of this machine. After a failure, the other machines also end with this exit code.
        """
        with self._lock:
            for line in self._lines.values():
                line.send(leaving=True, why=why, exit_code=exit_code)
        self._is_over.set()

    def send_views(self, views: list[dict[str, Any]]) -> None:
        """Send the state of this machine's ranks (`RankView` as dicts) to machine 0.

        Do nothing if earlier data has not been sent completely.
        """
        with self._lock:
            for line in self._lines.values():
                if not line.unsent:
                    line.send(views=views)

    def get_views(self) -> list[dict[str, Any]] | None:
        """Return the latest state of all ranks on other machines (`RankView` as dicts).

        Only machine 0 has this state; on other machines the result is None.
        """
        if self._me.machine:
            return None
        with self._lock:
            present = [line.peer for line in self._lines.values() if not line.peer.is_leaving]
            return [view for peer in present for view in peer.views]

    def find_silent(self, seconds: float = 3 * HEARTBEAT_INTERVAL) -> str | None:
        """Return a sentence that names a machine without recent heartbeats, or None if all machines send them.

        Args:
            seconds: Maximum age of a machine's last heartbeat.
        """
        now = time.monotonic()
        with self._lock:
            present = [line.peer for line in self._lines.values() if not line.peer.is_leaving]
        mute = [peer for peer in present if now - peer.heard > seconds]
        return _describe_silence(mute[0], now) if mute else None

    def _add_connection(self, line: _PeerConnection) -> None:
        with self._lock:
            self._lines[line.peer.machine if self._me.machine else -line.fileno()] = line
        self._selector.register(line, selectors.EVENT_READ, line)

    def _send_hello(self, line: _PeerConnection) -> None:
        me = self._me
        line.send(hello={"machine": me.machine, "host": me.host, "address": me.address, "ranks": me.ranks})

    def _watch_peers(self) -> None:
        """Receive messages, and once per second check for lost machines and send a heartbeat."""
        due = time.monotonic()
        while not self._is_over.is_set():
            for key, _ in self._selector.select(max(0.0, due - time.monotonic())):
                if key.data is None:
                    self._accept_connection()
                else:
                    self._receive_messages(key.data)
            if time.monotonic() < due:
                continue
            # If this process itself was stopped, unread heartbeats are in its buffers. Read them before checking ages.
            now = time.monotonic()
            if now - due < HEARTBEAT_INTERVAL:
                self._check_silence(now)
            due = now + HEARTBEAT_INTERVAL
            self._close_unproven(now - _CONNECT_TIMEOUT)
            with self._lock:
                for line in self._lines.values():
                    line.send()

    def _accept_connection(self) -> None:
        assert self._listener is not None
        assert self._seal is not None
        with contextlib.suppress(OSError):
            connection = self._listener.accept()[0]
            self._close_unproven(-math.inf, _MOST_UNPROVEN - 1)
            self._add_connection(
                _PeerConnection(connection, PeerMachine(-1, self._me.unit, heard=time.monotonic()), self._seal, True)
            )

    def _close_unproven(self, since: float, most: int = _MOST_UNPROVEN) -> None:
        """Close connections that have not authenticated if they are too old or too many.

        Args:
            since: Connections that were opened before this time are closed.
            most: Maximum number of connections without authentication. If there are more, the oldest are closed.
        """
        lines = [line for line in self._lines.values() if not line.is_proven and line.peer.machine < 0]
        for number, line in enumerate(lines):
            if line.begun < since or number < len(lines) - most:
                line.note_stranger()
                self._close_connection(line)

    def _receive_messages(self, line: _PeerConnection) -> None:
        was_proven = line.is_proven
        messages, is_gone = line.read()
        if line.is_proven and not was_proven and self._me.machine == 0:
            self._send_hello(line)
        for message in messages:
            self._handle_message(line, message)
        if is_gone:
            self._close_connection(line)
            if line.peer.machine >= 0 and not line.peer.is_leaving:
                self._report_loss(
                    f"{line.peer.format_name()} is gone: its launcher ended without a message, so it was killed or the machine "
                    f"went down{line.peer.describe_ranks()}",
                    line.peer.machine,
                )

    def _handle_message(self, line: _PeerConnection, message: dict[str, Any]) -> None:
        hello = message.get("hello")
        if isinstance(hello, dict):
            peer = line.peer
            peer.machine, peer.host = int(hello["machine"]), str(hello["host"])
            peer.address, peer.ranks = str(hello["address"]), tuple(hello["ranks"])
        elif isinstance(message.get("views"), list):
            line.peer.views = cast(list[dict[str, Any]], message["views"])
        elif message.get("leaving"):
            line.peer.is_leaving = True
            if message.get("why"):
                text = f"{line.peer.format_name()} has ended the run: {message['why']}"
                self._report_loss(text, line.peer.machine, message["exit_code"])
        elif isinstance(message.get("given_up"), str):
            self._report_loss(f"the other machines went on without this one: {message['given_up']}", line.peer.machine)
        elif isinstance(message.get("lost"), str):
            self._report_loss(message["lost"], -1, message["exit_code"])

    def _check_silence(self, now: float) -> None:
        for line in list(self._lines.values()):
            silence = now - line.peer.heard
            if silence > self._timeout and not line.peer.is_leaving and line.peer.machine >= 0:
                line.peer.is_leaving = True  # later messages from this machine, or its end, must change nothing
                text = _describe_silence(line.peer, now)
                line.send(given_up=text)
                self._report_loss(text, line.peer.machine)

    def _close_connection(self, line: _PeerConnection) -> None:
        self._selector.unregister(line)
        with self._lock:
            self._lines = {key: other for key, other in self._lines.items() if other is not line}
        line.connection.close()

    def _report_loss(self, text: str, machine: int, exit_code: int = 1) -> None:
        """Record that a machine is lost. On the hub, also report it to all other machines.

        Args:
            text: Sentence that names the lost machine.
            machine: Rank of the lost machine; -1 if the hub has reported the loss.
            exit_code: Exit code of the run. 0 is replaced by 1, because a run that has lost a machine has failed.
        """
        exit_code = exit_code or 1
        if self._me.machine == 0:
            with self._lock:
                for line in self._lines.values():
                    if line.peer.machine != machine:
                        line.send(lost=text, exit_code=exit_code)
        if self.lost is None and not self._is_over.is_set():
            self.has_lost_hub = machine == 0
            self.exit_code = exit_code
            self.lost = text
            self._on_loss()


def _describe_silence(peer: PeerMachine, now: float) -> str:
    return (
        f"{peer.format_name()} has sent no heartbeat for {now - peer.heard:.0f} s: the network connection is cut, or that machine is "
        f"stopped or frozen{peer.describe_ranks()}"
    )
