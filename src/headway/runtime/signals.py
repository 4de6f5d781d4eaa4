"""Signals as flags: what a scheduler sends becomes a value in the next vote, and nothing is interrupted.

Python runs its handlers in the main thread, between two instructions of its own: one that waits in a collective hears
nothing. The C part of a handler writes the signal's number into a pipe at once, which a thread reads here.
"""

import os
import signal
import socket
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

from headway.errors import StateError

DEFAULT = (signal.SIGTERM, signal.SIGUSR1)


class SignalFlags:
    """Which of some signals have come to this process, from `start` to `stop`; nothing is installed before.

    A handler that was there runs as well, in the main thread as ever. Where there was none, the signal no longer ends
    the process: that is the point.

    Args:
        signals: those to listen for.
    """

    def __init__(self, signals: Iterable[int] = DEFAULT) -> None:
        self._signals = tuple(signals)
        self._seen: set[int] = set()
        self._former: dict[int, Any] = {}
        self._former_fd = -1
        self._pipe: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to listen; twice is harmless.

        Raises:
            StateError: called outside the main thread, which alone may install handlers.
        """
        if self._pipe is not None:
            return
        if threading.current_thread() is not threading.main_thread():
            raise StateError(
                "signals can be listened for from the main thread only; call this where the program begins"
            )
        receiver, sender = self._pipe = socket.socketpair()
        sender.setblocking(False)
        self._former_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        for number in self._signals:
            self._former[number] = signal.signal(number, self._chain)
        self._thread = threading.Thread(target=self._listen, args=(receiver,), name="headway-signals", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Put back what was there before; in the main thread."""
        if self._pipe is None:
            return
        for number, former in self._former.items():
            if signal.getsignal(number) == self._chain:  # else somebody has installed a handler since, which stays
                signal.signal(number, former if former is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(self._former_fd)
        receiver, sender = self._pipe
        sender.close()
        assert self._thread is not None
        self._thread.join(5)
        receiver.close()
        self._former, self._pipe, self._thread = {}, None, None

    def has_seen(self, number: int) -> bool:
        """Has this signal come?"""
        return number in self._seen

    def flags(self) -> list[float]:
        """1.0 for each of the signals that has come, else 0.0, in the order given: values for a vote."""
        return [float(number in self._seen) for number in self._signals]

    def forget(self, number: int) -> None:
        """Take a signal as dealt with."""
        self._seen.discard(number)

    def _chain(self, number: int, frame: FrameType | None) -> None:
        self._seen.add(number)
        former = self._former.get(number)
        if callable(former):
            former(number, frame)

    def _listen(self, receiver: socket.socket) -> None:
        while numbers := receiver.recv(64):
            self._seen.update(number for number in numbers if number in self._signals)
            if self._former_fd >= 0:  # who listened before goes on to hear of everything
                os.write(self._former_fd, numbers)
