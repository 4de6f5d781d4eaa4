"""How this process is asked to end, and how it ends: signals as flags; tidied up, and by the exit code that it would have had.

What a scheduler sends becomes a value in the next vote, and nothing is interrupted. Python runs its handlers in the main thread,
between two instructions of its own: one that waits in a collective hears nothing. The C part of a handler writes the signal's number
into a pipe at once, which a thread reads here.

At its end the interpreter is left standing: an engine's thread that drops a tensor while Python takes itself down wants the
interpreter lock, does not get it any more, and the C++ runtime aborts the process: a finished run would count as failed. Torch-free.
"""

import atexit
import contextlib
import gc
import io
import os
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any, NoReturn

from headway.common import scope
from headway.errors import PREEMPTED, StateError


class ProcessExit:
    """The end of this process, once it has begun.

    Attributes:
        code: the exit code; None while the program runs, and where Python itself ends the process for all that is known.
    """

    def __init__(self) -> None:
        self.code: int | None = None

    @property
    def is_failure(self) -> bool:
        """Does it end otherwise than its peers, so that nothing may wait for them?"""
        return self.code not in (None, 0, PREEMPTED)


class AfterException:
    """What stands in `sys.excepthook`: what stood there before has its say, and then `end` may end the process.

    torch's own hook holds back what the one before it prints, until that returns: so this stands above all of them, and a
    group that begins later needs a new one. Under a hook that somebody has set since, nothing may end before that returns.

    Args:
        end: is told of the exception, and whether all has been said.
    """

    def __init__(self, end: Callable[[BaseException, bool], None]) -> None:
        self.former = sys.excepthook
        self._end = end
        self._is_on = True
        sys.excepthook = self

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.former(kind, error, trace)
        if self._is_on:
            self._end(error, sys.excepthook is self)

    def take_out(self) -> None:
        """Put back what was there; where somebody has set another hook since, that one stays."""
        self._is_on = False
        if sys.excepthook is self:
            sys.excepthook = self.former


def has_failed() -> bool:
    """Is it known that this process ends by a failure?"""
    return scope.own(ProcessExit).is_failure


def note_failure(code: int) -> None:
    """This process ends by this exit code, though Python itself ends it."""
    scope.own(ProcessExit).code = code


def is_uncaught(error: BaseException) -> bool:
    """Is it the exception by which Python ends this process? It says so before it calls `sys.excepthook`."""
    is_interactive = bool(sys.flags.interactive) or hasattr(sys, "ps1")
    return getattr(sys, "last_value", None) is error and not is_interactive


def leave(code: int) -> NoReturn:
    """End this process as multiprocessing ends its children.

    As in Python's own order: threads that are no daemons are waited for, functions of `atexit` run (all of them, the last
    registered first), open files are flushed. Then it ends, without `__del__` methods and the end of daemon threads.
    """
    scope.own(ProcessExit).code = code
    for tidy in (threading._shutdown, atexit._run_exitfuncs, _flush):  # type: ignore[attr-defined]
        try:
            tidy()
        except SystemExit:
            pass
        except BaseException:  # said and passed over, as Python does with what fails at exit
            traceback.print_exc()
    os._exit(code)


def _flush() -> None:
    """Write out what stands in the buffers of open files; Python would do so while it takes them down."""
    buffers = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    # By type, not isinstance, which asks the object and wakes up lazy ones.
    files = [each for each in gc.get_objects() if issubclass(type(each), io.IOBase)]
    for file in (each for each in files if issubclass(type(each), buffers)):
        with contextlib.suppress(OSError, ValueError):  # closed, detached, or its reader is gone
            file.flush()
    for file in (each for each in files if type(each).__module__ in ("bz2", "gzip", "lzma")):
        with contextlib.suppress(OSError, ValueError):
            file.close()  # what is compressed has an end to write


# ---------------------------------------------------------------- being asked to

DEFAULT = (signal.SIGTERM, signal.SIGUSR1)


class SignalFlags:
    """Which of some signals have come to this process, from `start` to `stop`; nothing is installed before.

    A handler that was there runs as well, in the main thread as ever. Where there was none, the signal no longer ends
    the process: that is the point.

    Args:
        signals: those to listen for.

    Attributes:
        heard: set by each signal that comes, for a thread that waits for one.
        listeners: called by the thread when a signal comes.
        times: when the first and the last one came, by the monotonic clock; None before.
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
        scope.own(_Listening).add(self)

    def stop(self, *, then_ignore: bool = False) -> None:
        """Put back what was there before; in the main thread.

        Args:
            then_ignore: where nothing was there, later signals do nothing: this process has heard, and is about to end.
        """
        if self._pipe is None:
            return
        scope.own(_Listening).discard(self)
        self._give_back(signal.SIG_IGN if then_ignore else signal.SIG_DFL)
        receiver, sender = self._pipe
        sender.close()
        assert self._thread is not None
        self._thread.join(5)
        receiver.close()
        self._former, self._pipe, self._thread = {}, None, None

    def _give_back(self, nothing: signal.Handlers) -> None:
        for number, former in self._former.items():
            if signal.getsignal(number) == self._chain:  # else somebody has installed a handler since, which stays
                signal.signal(number, nothing if former in (None, signal.SIG_DFL) else former)
        signal.set_wakeup_fd(self._former_fd)

    @property
    def has_former(self) -> bool:
        """Did somebody else listen before, who hears of the signals too?"""
        return any(map(callable, self._former.values()))

    @property
    def first(self) -> int | None:
        """The lowest of the signals that have come; None where none has."""
        return min(self._seen, default=None)

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
            if known := [number for number in numbers if number in self._signals]:
                now = time.monotonic()
                self.times = (now if self.times is None else self.times[0], now)
                self._seen.update(known)
                self.heard.set()
                for hear in list(self.listeners):
                    hear()
            if self._former_fd >= 0:  # who listened before goes on to hear of everything
                os.write(self._former_fd, numbers)


class _Listening(weakref.WeakSet[SignalFlags]):
    """Those that listen in this process."""


def listened_for() -> tuple[int, ...]:
    """The signals that somebody in this process listens for, by number."""
    return tuple(sorted({number for flags in scope.own(_Listening) for number in flags._signals}))


def tell(hear: Callable[[], None]) -> None:
    """Call `hear` in a thread when a signal comes that somebody in this process listens for."""
    for flags in scope.own(_Listening):
        flags.listeners.append(hear)


def _leave_alone() -> None:
    """A forked child is not the rank: it ends by SIGTERM as ever, and writes nothing into the rank's pipe."""
    for flags in list(scope.own(_Listening)):
        flags._give_back(signal.SIG_DFL)
    scope.drop(_Listening)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_alone)
