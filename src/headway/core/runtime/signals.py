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

DEFAULT = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""Signals that are handled by default: SIGTERM and SIGUSR1. Windows has no SIGUSR1."""


class SignalFlags:
    """Recorder of the signals that reach this process between `start` and `stop`.

    `start` installs the handlers. A handler that other code has already installed still runs, in the main thread. If
    there was none, the signal no longer ends the process, which is intended.

    Args:
        signals: Signals to handle. Default: SIGTERM and SIGUSR1.

    Attributes:
        has_arrived: `threading.Event` that is set at each signal. A thread can wait for it.
        listeners: Functions without arguments that a background thread calls when a signal arrives.
        arrival_times: Times of the first and the last signal, in seconds on the monotonic clock; None before the first.
    """

    def __init__(self, signals: Iterable[int] = DEFAULT) -> None:
        self.has_arrived = threading.Event()
        self.arrival_times: tuple[float, float] | None = None
        self.listeners: list[Callable[[], None]] = []
        self._signals = tuple(signals)
        self._arrived_signals: set[int] = set()  # numbers of the signals that have arrived
        self._previous_handlers: dict[int, Any] = {}  # by signal, as `signal.signal` returned them
        self._previous_wakeup_fd = -1  # as `signal.set_wakeup_fd` returned it; -1 for none
        # Pair of (socket from which the thread reads, socket to which Python writes); None before `start` and after `stop`.
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
        self._previous_wakeup_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        for number in self._signals:
            self._previous_handlers[number] = signal.signal(number, self._call_previous_handler)
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
        self._previous_handlers = {}
        self._pipe = None
        self._thread = None

    def _restore_handlers(self, default: signal.Handlers) -> None:
        """Restore the signal handlers that were installed before ours, and the previous wakeup file descriptor.

        Args:
            default: Handler for signals that had none.
        """
        for number, previous in self._previous_handlers.items():
            if signal.getsignal(number) != self._call_previous_handler:
                continue  # other code has installed a handler since, which stays
            had_handler = previous not in (None, signal.SIG_DFL)
            signal.signal(number, previous if had_handler else default)
        signal.set_wakeup_fd(self._previous_wakeup_fd)

    @property
    def has_previous_handler(self) -> bool:
        """Whether other code had installed a handler for one of the signals before `start`.

        That handler also receives the signal. False before `start` and after `stop`.
        """
        return any(map(callable, self._previous_handlers.values()))

    @property
    def lowest_signal(self) -> int | None:
        """Lowest number among the signals that have arrived, or None if none has arrived."""
        return min(self._arrived_signals, default=None)

    def _call_previous_handler(self, number: int, frame: FrameType | None) -> None:
        """Record that a signal has arrived, and call the handler that was installed before ours. This is a signal handler."""
        self._arrived_signals.add(number)
        previous = self._previous_handlers.get(number)
        if callable(previous):
            previous(number, frame)

    def _receive_signals(self, receiver: socket.socket) -> None:
        """Record signals from the wakeup file descriptor, and call the listeners, as a thread, until the socket is closed.

        A signal is seen here even while the main thread runs C code, in which Python runs no signal handlers.
        """
        while numbers := receiver.recv(64):
            handled = [number for number in numbers if number in self._signals]
            if handled:
                now = time.monotonic()
                first_time = now if self.arrival_times is None else self.arrival_times[0]
                self.arrival_times = (first_time, now)
                self._arrived_signals.update(handled)
                self.has_arrived.set()
                for listener in list(self.listeners):
                    listener()
            if self._previous_wakeup_fd >= 0:  # the previous wakeup fd still gets every signal
                os.write(self._previous_wakeup_fd, numbers)


class _ActiveFlags(weakref.WeakSet[SignalFlags]):
    """Registry of the active `SignalFlags` objects of this process, held by weak references."""


def list_handled_signals() -> tuple[int, ...]:
    """Return the sorted numbers of the signals that this process handles with `SignalFlags`."""
    return tuple(sorted({number for flags in scope.get_or_create(_ActiveFlags) for number in flags._signals}))


def add_listener(listener: Callable[[], None]) -> None:
    """Register a function that a background thread calls whenever a handled signal arrives.

    Do nothing if this process handles no signals with `SignalFlags` at the moment.

    Args:
        listener: Function without arguments.
    """
    for flags in scope.get_or_create(_ActiveFlags):
        flags.listeners.append(listener)


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
