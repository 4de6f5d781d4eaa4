"""Where a program is: its frames, and tracebacks down to the user's own line. The one place that walks up a stack.

A traceback is told as a user needs it: down to the user's last line, without what Headway and torch do in between.
"""

import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType, TracebackType

from headway.errors import HeadwayError

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


def is_called_by(code: CodeType) -> bool:
    """Is the function that asks called by this code?"""
    return sys._getframe(2).f_code is code


def users_frame(frame: FrameType | None = None, but: Container[str] = ()) -> FrameType | None:
    """The user's innermost frame from `frame` (None: here) on, not in a file of `but`; None where there is none."""
    frames = ((each, each.f_code.co_filename) for each in stack(frame or sys._getframe(1)))
    return next((each for each, file in frames if is_users(file) and file not in but), None)


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


# How calls travel through torch and Python: frames that are the same in every traceback, and say nothing of its cause.
_CARRIERS = tuple(
    path.replace("/", os.sep)
    for path in (
        "/torch/nn/modules/module.py",
        "/torch/nn/parallel/distributed.py",
        "/torch/autograd/",
        "/torch/_tensor.py",
        "/torch/_utils.py",
        "/torch/utils/data/dataloader.py",
        "/torch/utils/data/_utils/",
        "/torch/utils/_contextlib.py",
        "/torch/utils/checkpoint.py",
        "/torch/optim/optimizer.py",
        "/torch/optim/lr_scheduler.py",
        "/torch/amp/",
        "/torch/distributed/c10d_logger.py",
        "/torch/distributed/elastic/",
    )
)
_FROZEN = ("<frozen runpy>", "<frozen importlib")

_PLACE = r'  File "([^"]+)", line \d+ in '

_NOISE = (
    # gloo's place in its own source, its guess at the cause, and its farewell
    r"\[/[^\]\s]+\.(?:cc|cpp|h):\d+\] ?",
    r" ?This is typically (?:caused by|due to) [^\n]*?GLHF! ?\S*",
    # torch's C++ stack
    r"\n?Exception raised from [^\n]* \(most recent call first\):(?:\n(?:frame #|<omitting)[^\n]*)*",
)


def plain(text: str) -> str:
    """An engine's message without its own source lines, C++ stack and good wishes."""
    for pattern in _NOISE:
        text = re.sub(pattern, "", text)
    return text


def shorten_crash(dump: str) -> str:
    """faulthandler's stacks: of each thread the user's frames, most recent first; all of it where none is the user's."""
    kept = []
    for thread in dump.split("\n\n"):
        heading, *frames = thread.splitlines() or [""]
        own = [line for line in frames if (place := re.match(_PLACE, line)) and is_users(place[1])]
        if own:
            kept += [heading, *own]
    return "\n".join(kept) or dump


def shorten(error: BaseException) -> tuple[str, int]:
    """The traceback as a user needs it.

    Left out are the frames of Headway where it raised the error on purpose, or where they only carry a call between the
    user's lines, and those of torch's machinery that carry it on. What was raised in Headway by mistake is shown whole.

    Returns:
        The text, and how many frames it leaves out; 0 where it is the traceback as Python prints it.
    """
    told = traceback.TracebackException.from_exception(error)
    num_hidden = _trim(told, error, is_ours=False, seen=set())
    text = plain("".join(told.format()))
    if num_hidden:
        frames = "frame" if num_hidden == 1 else "frames"
        note = f"({num_hidden} {frames} of Headway and torch left out; HEADWAY_LOG_LEVEL=debug shows all)"
        text = text.rstrip("\n") + f"\n{note}\n"
    return text, num_hidden


def _trim(told: traceback.TracebackException, error: BaseException | None, is_ours: bool, seen: set[int]) -> int:
    """Take frames out of an exception's stack and of those that it came from; return how many."""
    if id(told) in seen:
        return 0
    seen.add(id(told))
    is_ours = is_ours or isinstance(error, HeadwayError)
    kept = _kept(list(told.stack), is_ours)
    num_hidden = len(told.stack) - len(kept)
    if num_hidden and not kept:
        told.stack = None  # type: ignore[assignment]  # the line alone, without a heading over nothing
    elif num_hidden:
        told.stack = traceback.StackSummary.from_list(kept)
    for name in ("__cause__", "__context__"):
        if (inner := getattr(told, name)) is not None:
            num_hidden += _trim(inner, getattr(error, name, None), is_ours, seen)
    for inner, its in zip(getattr(told, "exceptions", None) or (), getattr(error, "exceptions", None) or ()):
        num_hidden += _trim(inner, its, is_ours, seen)
    return num_hidden


def _kept(frames: list[traceback.FrameSummary], is_ours: bool) -> list[traceback.FrameSummary]:
    if not frames or (is_headways(frames[-1].filename) and not is_ours):
        return frames
    kept = [frame for frame in frames if not is_headways(frame.filename) and not _is_carrier(frame)]
    return kept if kept or is_ours else frames


def _is_carrier(frame: traceback.FrameSummary) -> bool:
    if (name := frame.filename) == "<string>":
        return frame.name == "__init__"  # as dataclasses write it
    return name.startswith(_FROZEN) or any(part in name for part in _CARRIERS)


class _Printer:
    """What stands in `sys.excepthook`; once it is off, it hands everything on to what stood there before."""

    def __init__(self, is_short: Callable[[], bool]) -> None:
        self.former = sys.excepthook
        self.is_on = True
        self.notes: list[Callable[[BaseException], str]] = []
        # A hook of the program's own prints as it likes.
        self._is_short = is_short if self.former is sys.__excepthook__ else lambda: False

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_short = self.is_on and isinstance(error, Exception) and self._is_short()
        text, num_hidden = shorten(error) if is_short else ("", 0)
        if num_hidden and sys.stderr is not None:
            sys.stderr.write(text)
            sys.stderr.flush()
        else:
            self.former(kind, error, trace)
        if self.is_on and (said := self.says(error)):
            print(said, file=sys.stderr)

    def says(self, error: BaseException) -> str:
        """What there is to say of the exception, a part a paragraph."""
        return "\n".join(said for note in self.notes if (said := note(error)))


class Hook:
    """Headway's one way to an exception that ends this process: its traceback is shortened, and notes follow it.

    The process runtime takes it out where it ends. A hook that the program set before prints in our place, one that it
    sets later replaces this one, and stays.
    """

    def __init__(self) -> None:
        self._printer: _Printer | None = None

    def put_in(self, is_short: Callable[[], bool]) -> None:
        """Stand in `sys.excepthook`, once.

        Args:
            is_short: asked when an exception comes; False: print it as Python does.
        """
        if self._printer is None:
            self._printer = sys.excepthook = _Printer(is_short)

    def add(self, note: Callable[[BaseException], str]) -> None:
        """Print what `note` says of the exception after it; nothing where that is empty."""
        if self._printer is not None and note not in self._printer.notes:
            self._printer.notes.append(note)

    def says(self, error: BaseException) -> str:
        """What was added to say of the exception; empty where there is nothing."""
        return "" if self._printer is None else self._printer.says(error)

    def take_out(self) -> None:
        """Put back what was there before; where somebody has set another hook since, that one stays."""
        if self._printer is None:
            return
        self._printer.is_on = False
        if sys.excepthook is self._printer:
            sys.excepthook = self._printer.former
        self._printer = None
