"""Where a program is: its frames, and which of them is the user's own line. The one place that walks up a stack."""

import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from types import FrameType, TracebackType

_GENERATED = ("<frozen ", "<string>", "<__array_function__", "<eval_with_key>", "<attrs generated", "<decorator-gen")
"""Code that Python and libraries make as they run; what else has no file is a user's: a notebook's cell, a console, exec."""

_HEADWAY = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_FOLDERS = sorted({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_LIBRARIES = (*_GENERATED, _HEADWAY, *(folder + os.sep for folder in _FOLDERS))
"""Found at the import (2 ms), since who asks for a line may do so because the disk fails."""


@dataclass(frozen=True)
class Frame:
    """A place in a program."""

    file: str
    line: int
    function: str

    @classmethod
    def of(cls, frame: FrameType) -> "Frame":
        """Where that frame is now."""
        return cls(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)

    def __str__(self) -> str:
        """`train.py:12 in main`."""
        try:
            name = self.file.removeprefix(os.getcwd() + os.sep)
        except OSError:  # the folder is gone
            name = self.file
        return f"{name}:{self.line}" + ("" if self.function == "<module>" else f" in {self.function}")

    @property
    def source(self) -> str:
        """The line's text, where this machine has the file."""
        return linecache.getline(self.file, self.line).strip()


def is_headways(file: str) -> bool:
    """Is it a file of this package?"""
    return file.startswith(_HEADWAY)


@lru_cache(maxsize=4096)  # each collective asks this of every frame between it and the user's line
def is_users(file: str) -> bool:
    """Is it neither of Headway, nor of an installed package, nor of Python itself?"""
    return not file.startswith(_LIBRARIES)


def stack(frame: FrameType | None = None) -> Iterator[FrameType]:
    """The frames from `frame` on, innermost first; None: from the caller's own."""
    return _outward(frame or sys._getframe(1))


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def way(depth: int) -> tuple[tuple[int, int], ...]:
    """The places that lead to the caller's caller, innermost first: alike where a call comes the same way."""
    frames = islice(_outward(sys._getframe(2)), depth)
    return tuple((id(frame.f_code), frame.f_lineno) for frame in frames)


def users_frame(frame: FrameType | None = None, besides: Collection[str] = ()) -> FrameType | None:
    """The user's innermost frame from `frame` (None: here) on, which is in none of the files `besides`; None where there is none."""
    files = ((each, each.f_code.co_filename) for each in stack(frame or sys._getframe(1)))
    return next((each for each, file in files if is_users(file) and file not in besides), None)


def call_site() -> str:
    """`file:line` of the user's innermost frame; where none is the user's, of the innermost outside Headway."""
    here = sys._getframe(1)
    found = users_frame(here)
    if found is None:
        outside = (each for each in stack(here) if not is_headways(each.f_code.co_filename))
        found = next(outside, here)
    return f"{found.f_code.co_filename}:{found.f_lineno}"


def users_line(trace: TracebackType | None) -> str:
    """The user's innermost line in a traceback, "train.py:12 in main"; "" where none is the user's."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(trace) if is_users(frame.f_code.co_filename)]
    if not frames:
        return ""
    frame, line = frames[-1]
    return str(Frame(frame.f_code.co_filename, line, frame.f_code.co_name))
