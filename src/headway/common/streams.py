"""Replacement of standard streams that are closed when a command starts, as in `headway launch train.py >&-`."""

import os
import sys
from typing import TextIO

_NUM_STANDARD = 3


def open_standard_streams() -> None:
    """Connect each closed standard stream to the null device, for this process and its child processes.

    Python sets `sys.stdout` to None if its file descriptor is closed. The next file or socket that is opened would get
    this descriptor number, and the output of child processes would be written into it.
    """
    for descriptor in range(_NUM_STANDARD):
        if not _is_open(descriptor):
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
    sys.stdin = sys.stdin or _open_text(0, "r")
    sys.stdout = sys.stdout or _open_text(1, "w")
    sys.stderr = sys.stderr or _open_text(2, "w")


def _is_open(descriptor: int) -> bool:
    """Whether a file descriptor of this process is open."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _open_text(descriptor: int, mode: str) -> TextIO:
    return open(descriptor, mode, encoding="utf-8", errors="backslashreplace", closefd=False)  # type: ignore[return-value]
