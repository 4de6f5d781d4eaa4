"""Functions for worker processes, in a module that imports little, because each spawned process imports it."""

import os
import signal

from headway.errors import DataError


def is_interrupt_blocked(_: int) -> bool:
    """Whether this process was started with SIGINT blocked."""
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def double_or_die(number: int) -> int:
    """Return twice the number; 3 raises a `DataError`, 4 an `OSError`, and 5 kills the worker."""
    if number == 3:
        raise DataError("three is damaged")
    if number == 4:
        raise OSError("four")
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * number
