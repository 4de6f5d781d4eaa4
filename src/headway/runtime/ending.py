"""How this process ends: tidied up, but with the interpreter left standing, and by the exit code that it would have had.

An engine's thread that drops a tensor while Python takes itself down wants the interpreter lock, does not get it any more,
and the C++ runtime aborts the process: a finished run would count as failed. Torch-free.
"""

import atexit
import contextlib
import gc
import io
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from headway.common import scope
from headway.errors import PREEMPTED


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
