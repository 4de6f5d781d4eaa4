"""Heartbeats between the launchers' agents, which detect lost machines.

The heartbeats need neither the rendezvous store nor the workers. The agent of machine 0 is the hub. It listens on a
free port, which the other agents receive at the rendezvous. Each of them keeps one connection to the hub and sends one
line per second. The hub answers, and reports the machines that it has lost. So a cut link, a stopped machine and a dead
machine are detected within `timeout`, whereas a communication library's timeouts take minutes. If a link is cut, the
machines on both sides end their ranks. The agents use plain TCP, because a call to a store whose machine is cut off
might never return.
"""

import contextlib
import math
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from headway.common.sealing import Seal
from headway.core.runtime.network import open_listener
from headway.launch.agent.peer_connection import PeerConnection, PeerMachine

HEARTBEAT_INTERVAL = 1.0
"""Seconds between two heartbeats."""
_CONNECT_TIMEOUT = 10.0
"""Maximum seconds for connecting to machine 0's port and authenticating there.

If a firewall blocks the port, the run continues without heartbeats.
"""
_MOST_UNPROVEN = 256
"""Maximum number of connections that have not authenticated yet. If there are more, the oldest one is closed."""


class PeerMachines:
    """This machine's connections to the other machines, used to exchange heartbeats and to detect lost machines.

    Args:
        machine: Rank of this machine; 0 is the hub.
        address: Address by which the other machines reach this one.
        timeout: Seconds without a heartbeat after which a machine counts as lost.
        on_loss: Function that is called after `lost` has been set, at most once per start of the ranks. It is called on
            a background thread.
        unit: Word for a machine in messages: "machine", or "task" if each process has its own launcher.
            Default: "machine".

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
        # By rank of the machine. Machine 0 does not know it at first, and uses a negative number.
        self._connections: dict[int, PeerConnection] = {}
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
        if self._me.machine and 0 not in self._connections:
            try:
                new_socket = socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT)
            except OSError as error:
                return f"machine 0 cannot be reached at {host}:{port} ({error.strerror or error})"
            connection = PeerConnection(
                new_socket, PeerMachine(0, self._me.unit, address=host, heard=time.monotonic()), seal, False
            )
            if not connection.wait_for_nonce(_CONNECT_TIMEOUT):
                new_socket.close()
                return f"machine 0 does not answer at {host}:{port}"
            self._add_connection(connection)
        with self._lock:
            for connection in self._connections.values():
                self._send_hello(connection)
        if self._thread.ident is None:
            self._thread.start()
        return None

    def announce_end(self, why: str = "", exit_code: int = 0) -> None:
        """Announce to the other machines that this machine ends, and stop exchanging heartbeats.

        Args:
            why: Failure that ended this machine's ranks, after which the other machines end theirs. Empty if the ranks
                ended well. Default: empty.
            exit_code: Exit code of this machine. After a failure, the other machines also end with this exit code.
                Default: 0.
        """
        with self._lock:
            for connection in self._connections.values():
                connection.send(leaving=True, why=why, exit_code=exit_code)
        self._is_over.set()

    def send_views(self, views: list[dict[str, Any]]) -> None:
        """Send the state of this machine's ranks (`RankView` as dicts) to machine 0.

        Do nothing if earlier data has not been sent completely.
        """
        with self._lock:
            for connection in self._connections.values():
                if not connection.unsent:
                    connection.send(views=views)

    def get_views(self) -> list[dict[str, Any]] | None:
        """Return the latest state of all ranks on other machines (`RankView` as dicts).

        Only machine 0 has this state; on other machines the result is None.
        """
        if self._me.machine:
            return None
        with self._lock:
            present = [connection.peer for connection in self._connections.values() if not connection.peer.is_leaving]
            return [view for peer in present for view in peer.views]

    def find_silent(self, seconds: float = 3 * HEARTBEAT_INTERVAL) -> str | None:
        """Return a sentence that names a machine without recent heartbeats, or None if all machines send them.

        Args:
            seconds: Maximum age of a machine's last heartbeat. Default: three heartbeat intervals.
        """
        now = time.monotonic()
        with self._lock:
            present = [connection.peer for connection in self._connections.values() if not connection.peer.is_leaving]
        silent = [peer for peer in present if now - peer.heard > seconds]
        return _describe_silence(silent[0], now) if silent else None

    def _add_connection(self, connection: PeerConnection) -> None:
        """Add a connection, and start to receive its messages. Other machines have only one, to machine 0."""
        is_hub = self._me.machine == 0
        key = -connection.fileno() if is_hub else connection.peer.machine
        with self._lock:
            self._connections[key] = connection
        self._selector.register(connection, selectors.EVENT_READ, connection)

    def _send_hello(self, connection: PeerConnection) -> None:
        """Send this machine's rank, host, address and ranks to another machine."""
        me = self._me
        connection.send(hello={"machine": me.machine, "host": me.host, "address": me.address, "ranks": me.ranks})

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
                for connection in self._connections.values():
                    connection.send()

    def _accept_connection(self) -> None:
        """Accept a connection. If too many have not authenticated, the oldest of them is closed first."""
        assert self._listener is not None
        assert self._seal is not None
        with contextlib.suppress(OSError):
            new_socket, _ = self._listener.accept()
            self._close_unproven(-math.inf, _MOST_UNPROVEN - 1)
            self._add_connection(
                PeerConnection(new_socket, PeerMachine(-1, self._me.unit, heard=time.monotonic()), self._seal, True)
            )

    def _close_unproven(self, since: float, most: int = _MOST_UNPROVEN) -> None:
        """Close connections that have not authenticated if they are too old or too many.

        Args:
            since: Connections that were opened before this time are closed.
            most: Maximum number of connections without authentication. If there are more, the oldest are closed.
                Default: `_MOST_UNPROVEN`.
        """
        unproven = [each for each in self._connections.values() if not each.is_proven and each.peer.machine < 0]
        num_excess = len(unproven) - most
        for index, connection in enumerate(unproven):  # the oldest first
            if connection.open_time < since or index < num_excess:
                connection.count_stranger()
                self._close_connection(connection)

    def _receive_messages(self, connection: PeerConnection) -> None:
        """Handle the messages on a connection. Report a loss if it was closed without an announcement."""
        was_proven = connection.is_proven
        messages, is_gone = connection.read()
        if connection.is_proven and not was_proven and self._me.machine == 0:
            self._send_hello(connection)
        for message in messages:
            self._handle_message(connection, message)
        if is_gone:
            self._close_connection(connection)
            peer = connection.peer
            if peer.machine >= 0 and not peer.is_leaving:
                text = (
                    f"{peer.format_name()} is gone: its launcher ended without a message, so it was killed or the machine "
                    f"went down{peer.describe_ranks()}"
                )
                self._report_loss(text, peer.machine)

    def _handle_message(self, connection: PeerConnection, message: dict[str, Any]) -> None:
        """Handle one message: an introduction, states of ranks, an announced end, or the report of a lost machine.

        Args:
            connection: Connection on which the message has arrived.
            message: Fields of the message. Without fields it is a heartbeat, and nothing is done.
        """
        hello = message.get("hello")
        if isinstance(hello, dict):
            peer = connection.peer
            peer.machine, peer.host = int(hello["machine"]), str(hello["host"])
            peer.address, peer.ranks = str(hello["address"]), tuple(hello["ranks"])
        elif isinstance(message.get("views"), list):
            connection.peer.views = cast(list[dict[str, Any]], message["views"])
        elif message.get("leaving"):
            connection.peer.is_leaving = True
            if message.get("why"):
                text = f"{connection.peer.format_name()} has ended the run: {message['why']}"
                self._report_loss(text, connection.peer.machine, message["exit_code"])
        elif isinstance(message.get("given_up"), str):
            text = f"the other machines went on without this one: {message['given_up']}"
            self._report_loss(text, connection.peer.machine)
        elif isinstance(message.get("lost"), str):
            self._report_loss(message["lost"], -1, message["exit_code"])

    def _check_silence(self, now: float) -> None:
        """Report the loss of machines that have sent no heartbeat for longer than the timeout.

        Args:
            now: Current time on this process's monotonic clock.
        """
        for connection in list(self._connections.values()):
            silence = now - connection.peer.heard
            if silence > self._timeout and not connection.peer.is_leaving and connection.peer.machine >= 0:
                connection.peer.is_leaving = True  # later messages from this machine, or its end, must change nothing
                text = _describe_silence(connection.peer, now)
                connection.send(given_up=text)
                self._report_loss(text, connection.peer.machine)

    def _close_connection(self, connection: PeerConnection) -> None:
        """Close a connection, and forget the machine at its other end."""
        self._selector.unregister(connection)
        with self._lock:
            self._connections = {key: other for key, other in self._connections.items() if other is not connection}
        connection.socket.close()

    def _report_loss(self, text: str, machine: int, exit_code: int = 1) -> None:
        """Record that a machine is lost. On the hub, also report it to all other machines.

        Args:
            text: Sentence that names the lost machine.
            machine: Rank of the lost machine; -1 if the hub has reported the loss.
            exit_code: Exit code of the run. 0 is replaced by 1, because a run that has lost a machine has failed.
                Default: 1.
        """
        exit_code = exit_code or 1
        if self._me.machine == 0:
            with self._lock:
                for connection in self._connections.values():
                    if connection.peer.machine != machine:
                        connection.send(lost=text, exit_code=exit_code)
        if self.lost is None and not self._is_over.is_set():
            self.has_lost_hub = machine == 0
            self.exit_code = exit_code
            self.lost = text
            self._on_loss()


def _describe_silence(peer: PeerMachine, now: float) -> str:
    """Return a sentence about a machine that sends no heartbeats, with the ranks on it."""
    return (
        f"{peer.format_name()} has sent no heartbeat for {now - peer.heard:.0f} s: the network connection is broken, or that "
        f"machine is stopped or frozen{peer.describe_ranks()}"
    )
