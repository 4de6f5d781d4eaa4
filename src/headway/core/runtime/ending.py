"""Exit of this process, with the right exit code and without finalizing the interpreter.

During finalization a backend thread that drops a tensor can no longer get the interpreter lock, and the C++ runtime
aborts the process. A finished run would then count as failed.

This module does not import torch.
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
    """State of this process's exit.

    Attributes:
        code: Exit code of this process. None while the program runs, or if Python itself ends the process with a code
            that is not known.
    """

    def __init__(self) -> None:
        self.code: int | None = None

    @property
    def is_failure(self) -> bool:
        """Whether this process is exiting because of an error. It then does not wait for the other ranks."""
        return self.code not in (None, 0, PREEMPTED)


class UncaughtExceptionHook:
    """Hook in `sys.excepthook` that calls the previous hook and then `end`, a function that may end the process.

    torch's own hook buffers the output of the previous hook until that hook returns. This hook must therefore be the
    outermost one, and must be installed again after each creation of a process group. If other code has installed a
    hook around this one, `end` must not end the process before that hook returns.

    Args:
        end: Function that is called with the exception and with whether this hook is the outermost one.

    Attributes:
        previous_hook: Previous `sys.excepthook`, which this hook calls first.
    """

    def __init__(self, end: Callable[[BaseException, bool], None]) -> None:
        self.previous_hook = sys.excepthook
        self._end = end
        self._is_installed = True
        sys.excepthook = self

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.previous_hook(kind, error, trace)
        if self._is_installed:
            self._end(error, sys.excepthook is self)

    def uninstall(self) -> None:
        """Restore the previous hook, unless other code has installed another hook in the meantime."""
        self._is_installed = False
        if sys.excepthook is self:
            sys.excepthook = self.previous_hook


def has_failed() -> bool:
    """Whether this process is exiting because of an error. A planned exit, as after a preemption, does not count."""
    return scope.get_or_create(ProcessExit).is_failure


def record_failure(code: int) -> None:
    """Record that Python itself will end this process with the exit code `code`, because of an error."""
    scope.get_or_create(ProcessExit).code = code


def is_uncaught(error: BaseException) -> bool:
    """Whether `error` is the exception with which Python ends this process.

    Python stores it in `sys.last_value` before it calls `sys.excepthook`. In an interactive session the result is
    False.
    """
    is_interactive = bool(sys.flags.interactive) or hasattr(sys, "ps1")
    return getattr(sys, "last_value", None) is error and not is_interactive


def end_process(code: int) -> NoReturn:
    """End this process without finalizing the interpreter, in the way that multiprocessing ends child processes.

    Follows Python's own order: join non-daemon threads, run all `atexit` functions (last registered first), flush
    open files. Then the process ends. `__del__` methods do not run, and daemon threads are not waited for.

    Args:
        code: Exit code of the process.
    """
    scope.get_or_create(ProcessExit).code = code
    for clean_up in (threading._shutdown, atexit._run_exitfuncs, _flush_files):  # type: ignore[attr-defined]
        try:
            clean_up()
        except SystemExit:
            pass
        except BaseException:  # Print and ignore, as Python does for errors at exit.
            traceback.print_exc()
    os._exit(code)


def _flush_files() -> None:
    """Flush the buffers of all open files, which Python would otherwise do during finalization."""
    buffers = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    # Check the type instead of using isinstance, which would initialize lazy objects.
    files = [each for each in gc.get_objects() if issubclass(type(each), io.IOBase)]
    for file in (each for each in files if issubclass(type(each), buffers)):
        with contextlib.suppress(OSError, ValueError):  # closed, detached, or the reader is gone
            file.flush()
    for file in (each for each in files if type(each).__module__ in ("bz2", "gzip", "lzma")):
        with contextlib.suppress(OSError, ValueError):
            file.close()  # compressed files need their trailer
