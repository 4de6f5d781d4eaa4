"""Do the other machines still live? The launchers' agents hear of one another every second, beside store and workers.

The agent of machine 0 listens on a free port, which the others learn when they meet. Each keeps one connection to it and sends
one line a beat; machine 0 answers, and passes on whom it has lost. So a cut link, a stopped machine and a dead one are noticed
within `timeout`, where an engine's own timeouts take minutes, and both sides of a cut end by themselves. It speaks TCP of its
own, as a call to a store whose machine is cut off may never return.

Each side of a connection begins with a word drawn for it. Every line after that proves the run, the two words, the side that says
it and its number: it cannot be made up, changed, repeated or sent back. A connection that begins otherwise is closed.
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

from headway.common.untrusted import Seal, plain
from headway.runtime.network import listen

BEAT = 1.0
"""Seconds between signs of life."""

_MEETING = 10.0
"""Seconds to reach machine 0's port in, and to prove oneself there; behind a firewall the run goes on without this watch."""

_MOST_UNPROVEN = 256
"""Connections at a time that have not proved to be of this run; the oldest makes room."""

_WORD = re.compile(rb"[0-9a-f]{32}")
_LONGEST_UNPROVEN, _LONGEST = 1 << 12, 1 << 24
"""Bytes of a line."""


@dataclass
class PeerMachine:
    """Another machine.

    Attributes:
        machine: its number.
        host, address: as it knows itself.
        ranks: the ranks on it.
        heard: when its last sign of life came, on this process's monotonic clock.
        is_leaving: has it said that it ends, or been given up?
        views: what its ranks' pulses say, for the hang watch.
    """

    machine: int
    unit: str = "machine"
    host: str = ""
    address: str = ""
    ranks: tuple[int, ...] = ()
    heard: float = 0.0
    is_leaving: bool = False
    views: list[dict[str, Any]] = field(default_factory=list)

    def name(self) -> str:
        """It, as a person knows it."""
        known = ", ".join(part for part in (f"host {self.host}" if self.host else "", self.address) if part)
        return f"{self.unit} {self.machine}" + (f" ({known})" if known else "")

    def load(self) -> str:
        """What was on it."""
        if not self.ranks:
            return ""
        word = "ranks" if len(self.ranks) > 1 else "rank"
        return f"; {word} {', '.join(map(str, self.ranks))} {'were' if len(self.ranks) > 1 else 'was'} on it"


class _PeerConnection:
    """One connection: bytes in, whole proven lines out, and never a wait.

    Args:
        connection: to the other side.
        peer: who that is, as far as it is known.
        seal: of the run.
        is_hub: is this side machine 0's?

    Attributes:
        is_proven: has a line proved the other side to be of this run?
        begun: when, on this process's monotonic clock.
        unsent: what the other side has not taken yet.
    """

    def __init__(self, connection: socket.socket, peer: PeerMachine, seal: Seal, is_hub: bool) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.peer = peer
        self.is_proven = False
        self.begun = time.monotonic()
        self._seal = seal
        self._is_hub = is_hub
        self._word, self._words = secrets.token_hex(16), ""
        self._num_said = self._num_heard = 0
        self._rest = b""
        self.unsent = b""
        self._push(self._word.encode() + b"\n")

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, **content: object) -> None:
        """A line; left out on machine 0 where the other side has not proved to be of this run."""
        if self.is_proven or not self._is_hub:
            data = json.dumps(content).encode() if content else b""
            self._push(self._seal.close(self._place(self._is_hub, self._num_said), data) + b"\n")
            self._num_said += 1

    def _push(self, data: bytes) -> None:
        data = self.unsent + data
        try:
            self.unsent = data[self.connection.send(data) :]
        except BlockingIOError:  # the other side does not read
            self.unsent = data
        except OSError:  # broken: reading will tell
            self.unsent = b""

    def _place(self, is_hub: bool, number: int) -> str:
        return f"line {self._words} {'from' if is_hub else 'to'} the hub {number}"

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """The messages that have come, and whether the other side is gone or none of this run."""
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
                if not self._begin(line):
                    return [], True
            elif (content := self._open(line)) is not None:
                messages.append(plain(json.loads(content or b"{}")))
            elif not self.is_proven:
                return [], True
        is_too_long = len(self._rest) > (_LONGEST if self.is_proven else _LONGEST_UNPROVEN)
        if is_too_long:
            self._seal.strangers.note(f"a line of more than {len(self._rest) - 1} bytes from {self._whence()}")
        return messages, is_too_long or not data

    def _begin(self, line: bytes) -> bool:
        """Take the other side's word; False where it is none."""
        if _WORD.fullmatch(line) is None:
            self.note_stranger()
            return False
        other = line.decode()
        self._words = f"{self._word} {other}" if self._is_hub else f"{other} {self._word}"
        return True

    def _open(self, line: bytes) -> bytes | None:
        content = self._seal.open(self._place(not self._is_hub, self._num_heard), line)
        if content is None:
            self._seal.strangers.note(f"a line from {self._whence()}")
            return None
        self._num_heard += 1
        self.is_proven = True
        self.peer.heard = time.monotonic()
        return content

    def note_stranger(self) -> None:
        """Count a connection that has not proved to be of this run."""
        self._seal.strangers.note(f"a connection from {self._whence()}")

    def _whence(self) -> str:
        try:
            return str(self.connection.getpeername()[0])
        except OSError:
            return "a connection that is gone"

    def meet(self, seconds: float) -> bool:
        """Wait for the other side's word, and say whether it came."""
        self.connection.settimeout(seconds)
        try:
            line = self.connection.makefile("rb", buffering=0).readline(33)
        except OSError:
            return False
        finally:
            self.connection.setblocking(False)
        return self._begin(line.rstrip(b"\n"))


class PeerMachines:
    """This machine's view of the others.

    Args:
        machine: this machine's number; 0 is the hub.
        address: how the others reach it.
        timeout: seconds without a sign of life after which a machine counts as lost.
        on_loss: called once an attempt, on a thread, when `lost` has been set.
        unit: what one of these is called: "machine", or "task" where each process has a launcher.

    Attributes:
        lost: a sentence that names the machine that was lost; None while all live.
        has_lost_hub: was it machine 0, at which machines meet?
        exit_code: what the run ends with then: the failed rank's, where a rank ended the run elsewhere; never 0.
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
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self.lost: str | None = None
        self.has_lost_hub = False
        self.exit_code = 1

    def open_hub(self, host: str) -> int:
        """On machine 0: listen for the others, at an address that they know; returns the port. Elsewhere 0."""
        if self._me.machine == 0 and self._listener is None:
            self._listener = listen(host)
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ)
        return int(self._listener.getsockname()[1]) if self._listener is not None else 0

    def meet(self, host: str, port: int, seal: Seal, ranks: Sequence[int]) -> str | None:
        """Join the others after they have met, and again at each new attempt.

        Args:
            host, port: where machine 0 listens.
            seal: of the run.
            ranks: those on this machine.

        Returns:
            Why machine 0 cannot be watched; None where it can.
        """
        self._me.ranks = tuple(ranks)
        self.lost = None
        self._seal = seal
        if self._me.machine and 0 not in self._lines:
            try:
                connection = socket.create_connection((host, port), timeout=_MEETING)
            except OSError as error:
                return f"machine 0 cannot be reached at {host}:{port} ({error.strerror or error})"
            line = _PeerConnection(
                connection, PeerMachine(0, self._me.unit, address=host, heard=time.monotonic()), seal, False
            )
            if not line.meet(_MEETING):
                connection.close()
                return f"machine 0 does not answer at {host}:{port}"
            self._add(line)
        with self._lock:
            for line in self._lines.values():
                self._introduce(line)
        if self._thread.ident is None:
            self._thread.start()
        return None

    def leave(self, why: str = "", exit_code: int = 0) -> None:
        """Tell the others that this machine ends, and stop watching.

        Args:
            why: the failure that ended it; empty where all went well. With one, the others end too.
            exit_code: this machine's, for the others to end with.
        """
        with self._lock:
            for line in self._lines.values():
                line.send(leaving=True, why=why, exit_code=exit_code)
        self._is_over.set()

    def tell(self, views: list[dict[str, Any]]) -> None:
        """Send what this machine's pulses say to machine 0; left out while the line is full."""
        with self._lock:
            for line in self._lines.values():
                if not line.unsent:
                    line.send(views=views)

    def heard(self) -> list[dict[str, Any]] | None:
        """On machine 0: what the other machines' pulses said last; elsewhere None."""
        if self._me.machine:
            return None
        with self._lock:
            present = [line.peer for line in self._lines.values() if not line.peer.is_leaving]
            return [view for peer in present for view in peer.views]

    def silent(self, seconds: float = 3 * BEAT) -> str | None:
        """A sentence about a machine that has said nothing for so long; None where all speak."""
        now = time.monotonic()
        with self._lock:
            present = [line.peer for line in self._lines.values() if not line.peer.is_leaving]
        mute = [peer for peer in present if now - peer.heard > seconds]
        return _silence(mute[0], now) if mute else None

    def _add(self, line: _PeerConnection) -> None:
        with self._lock:
            self._lines[line.peer.machine if self._me.machine else -line.fileno()] = line
        self._selector.register(line, selectors.EVENT_READ, line)

    def _introduce(self, line: _PeerConnection) -> None:
        me = self._me
        line.send(hello={"machine": me.machine, "host": me.host, "address": me.address, "ranks": me.ranks})

    def _watch(self) -> None:
        """Listen, judge and speak, beat by beat."""
        due = time.monotonic()
        while not self._is_over.is_set():
            for key, _ in self._selector.select(max(0.0, due - time.monotonic())):
                if key.data is None:
                    self._accept()
                else:
                    self._hear(key.data)
            if time.monotonic() < due:
                continue
            # A process that was stopped itself has everything in its buffers still, and must read before it judges.
            now = time.monotonic()
            if now - due < BEAT:
                self._judge(now)
            due = now + BEAT
            self._close_unproven(now - _MEETING)
            with self._lock:
                for line in self._lines.values():
                    line.send()

    def _accept(self) -> None:
        assert self._listener is not None
        assert self._seal is not None
        with contextlib.suppress(OSError):
            connection = self._listener.accept()[0]
            self._close_unproven(-math.inf, _MOST_UNPROVEN - 1)
            self._add(
                _PeerConnection(connection, PeerMachine(-1, self._me.unit, heard=time.monotonic()), self._seal, True)
            )

    def _close_unproven(self, since: float, most: int = _MOST_UNPROVEN) -> None:
        """Close connections that began before `since` and have proved nothing, and the oldest where there are more than `most`."""
        lines = [line for line in self._lines.values() if not line.is_proven and line.peer.machine < 0]
        for number, line in enumerate(lines):
            if line.begun < since or number < len(lines) - most:
                line.note_stranger()
                self._drop(line)

    def _hear(self, line: _PeerConnection) -> None:
        was_proven = line.is_proven
        messages, is_gone = line.read()
        if line.is_proven and not was_proven and self._me.machine == 0:
            self._introduce(line)
        for message in messages:
            self._understand(line, message)
        if is_gone:
            self._drop(line)
            if line.peer.machine >= 0 and not line.peer.is_leaving:
                self._lose(
                    f"{line.peer.name()} is gone: its launcher ended without a word, so it was killed or the machine went "
                    f"down{line.peer.load()}",
                    line.peer.machine,
                )

    def _understand(self, line: _PeerConnection, message: dict[str, Any]) -> None:
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
                text = f"{line.peer.name()} has ended the run: {message['why']}"
                self._lose(text, line.peer.machine, message["exit_code"])
        elif isinstance(message.get("given_up"), str):
            self._lose(f"the other machines went on without this one: {message['given_up']}", line.peer.machine)
        elif isinstance(message.get("lost"), str):
            self._lose(message["lost"], -1, message["exit_code"])

    def _judge(self, now: float) -> None:
        for line in list(self._lines.values()):
            silence = now - line.peer.heard
            if silence > self._timeout and not line.peer.is_leaving and line.peer.machine >= 0:
                line.peer.is_leaving = True  # what it still says, or its end, changes nothing
                text = _silence(line.peer, now)
                line.send(given_up=text)
                self._lose(text, line.peer.machine)

    def _drop(self, line: _PeerConnection) -> None:
        self._selector.unregister(line)
        with self._lock:
            self._lines = {key: other for key, other in self._lines.items() if other is not line}
        line.connection.close()

    def _lose(self, text: str, machine: int, exit_code: int = 1) -> None:
        """Tell this agent, and as the hub all others. A lost run never ends with 0."""
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


def _silence(peer: PeerMachine, now: float) -> str:
    return (
        f"{peer.name()} has not been heard of for {now - peer.heard:.0f} s: the network between is cut, or that machine is "
        f"stopped or frozen{peer.load()}"
    )
