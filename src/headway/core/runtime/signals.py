"""Signal handlers that only set flags, on which all ranks then vote.

Python runs signal handlers in the main thread between two bytecode instructions, so a main thread that waits in a
collective does not run them. But Python's C code writes the signal's number into a pipe at once, and a background
thread reads it from there. This module does not import torch.
"""

import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from headway.common import scope
from headway.errors import StateError

DEFAULT = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that are handled by default."""


class SignalFlags:
    """Flags for the signals that have reached this process between `start` and `stop`.

    `start` installs the handlers. A handler that other code has already installed still runs, in the main thread. If
    there was none, the signal no longer ends the process, which is intended.

    Args:
        signals: Signals to handle. Default: SIGTERM and SIGUSR1.

    Attributes:
        heard: `threading.Event` that is set at each signal. A thread can wait for it.
        listeners: Functions that a background thread calls when a signal arrives.
        times: Times of the first and the last signal on the monotonic clock; None before the first.
    """

    def __init__(self, signals: Iterable[int] = DEFAULT) -> None:
        self.heard = threading.Event()
        self.times: tuple[float, float] | None = None
        self.listeners: list[Callable[[], None]] = []
        self._signals = tuple(signals)
        self._seen: set[int] = set()
        self._former: dict[int, Any] = {}
        self._former_fd = -1
        self._pipe: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Install the signal handlers, and start the thread that sets the flags. A second call has no effect.

        Raises:
            StateError: If called outside the main thread. Only the main thread may install handlers.
        """
        if self._pipe is not None:
            return
        if threading.current_thread() is not threading.main_thread():
            raise StateError("signals can be handled only in the main thread; make this call in the main thread")
        receiver, sender = self._pipe = socket.socketpair()
        sender.setblocking(False)
        self._former_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        for number in self._signals:
            self._former[number] = signal.signal(number, self._call_former_handler)
        self._thread = threading.Thread(
            target=self._receive_signals, args=(receiver,), name="headway-signals", daemon=True
        )
        self._thread.start()
        scope.get_or_create(_ActiveFlags).add(self)

    def stop(self, *, then_ignore: bool = False) -> None:
        """Restore the previous handlers. Call this in the main thread.

        Do nothing if `start` was not called. A handler that other code has installed since `start` is kept.

        Args:
            then_ignore: Whether to ignore later signals that had no handler before, because this process is about to
                end. Default: False, which restores their default action.
        """
        if self._pipe is None:
            return
        scope.get_or_create(_ActiveFlags).discard(self)
        self._restore_handlers(signal.SIG_IGN if then_ignore else signal.SIG_DFL)
        receiver, sender = self._pipe
        sender.close()
        assert self._thread is not None
        self._thread.join(5)
        receiver.close()
        self._former = {}
        self._pipe = None
        self._thread = None

    def _restore_handlers(self, nothing: signal.Handlers) -> None:
        for number, former in self._former.items():
            if (
                signal.getsignal(number) == self._call_former_handler
            ):  # otherwise another handler was installed, which stays
                signal.signal(number, nothing if former in (None, signal.SIG_DFL) else former)
        signal.set_wakeup_fd(self._former_fd)

    @property
    def has_previous_handler(self) -> bool:
        """Whether other code had installed a handler for one of the signals before `start`.

        That handler also receives the signal. False before `start` and after `stop`.
        """
        return any(map(callable, self._former.values()))

    @property
    def first(self) -> int | None:
        """Lowest signal number among the signals whose flag is set, or None if there is none."""
        return min(self._seen, default=None)

    def list_flags(self) -> list[float]:
        """Return 1.0 for each handled signal that has arrived and 0.0 for the others, as values for a vote.

        The order is that of the constructor's `signals`.
        """
        return [float(number in self._seen) for number in self._signals]

    def clear_flag(self, number: int) -> None:
        """Clear the flag of a signal that has been dealt with."""
        self._seen.discard(number)

    def _call_former_handler(self, number: int, frame: FrameType | None) -> None:
        self._seen.add(number)
        former = self._former.get(number)
        if callable(former):
            former(number, frame)

    def _receive_signals(self, receiver: socket.socket) -> None:
        while numbers := receiver.recv(64):
            if known := [number for number in numbers if number in self._signals]:
                now = time.monotonic()
                self.times = (now if self.times is None else self.times[0], now)
                self._seen.update(known)
                self.heard.set()
                for hear in list(self.listeners):
                    hear()
            if self._former_fd >= 0:  # the previous wakeup fd still gets every signal
                os.write(self._former_fd, numbers)


class _ActiveFlags(weakref.WeakSet[SignalFlags]):
    """Registry of the active `SignalFlags` objects of this process, held by weak references."""


def list_handled_signals() -> tuple[int, ...]:
    """Return the sorted numbers of the signals that this process handles with `SignalFlags`."""
    return tuple(sorted({number for flags in scope.get_or_create(_ActiveFlags) for number in flags._signals}))


def add_listener(hear: Callable[[], None]) -> None:
    """Register a function that a background thread calls whenever a handled signal arrives.

    Do nothing if this process handles no signals with `SignalFlags` at the moment.

    Args:
        hear: Function without arguments.
    """
    for flags in scope.get_or_create(_ActiveFlags):
        flags.listeners.append(hear)


def _restore_in_child() -> None:
    """Restore default signal handling in a forked child.

    A child process is not a rank. SIGTERM must end it as usual. Its signals must not be written into the pipe that it
    has inherited, because the parent process reads that pipe.
    """
    for flags in list(scope.get_or_create(_ActiveFlags)):
        flags._restore_handlers(signal.SIG_DFL)
    scope.drop(_ActiveFlags)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restore_in_child)
