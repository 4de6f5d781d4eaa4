"""Tracebacks without the frames of Headway and torch, and the exception hook that prints them."""

import os
import re
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from headway.common.callsite import find_user_line, is_headway_file, is_user_file
from headway.errors import HeadwayError

# Files in which torch only forwards calls. Their frames are the same in every traceback and do not show the cause.
_FORWARDING_FILES = tuple(
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

_FRAME_LINE = r'  File "([^"]+)", line \d+ in '

_NOISE = (
    # gloo's position in its own source, its guess at the cause, and its sign-off
    r"\[/[^\]\s]+\.(?:cc|cpp|h):\d+\] ?",
    r" ?This is typically (?:caused by|due to) [^\n]*?GLHF! ?\S*",
    # torch's C++ stack
    r"\n?Exception raised from [^\n]* \(most recent call first\):(?:\n(?:frame #|<omitting)[^\n]*)*",
)


def remove_backend_noise(text: str) -> str:
    """Return an error message of PyTorch or gloo without C++ source positions, C++ stacks and boilerplate advice."""
    for pattern in _NOISE:
        text = re.sub(pattern, "", text)
    return text


def shorten_crash(dump: str) -> str:
    """Return faulthandler's output with only the frames of user code. Threads without such frames are left out.

    If no frame is user code, the whole output is returned.

    Args:
        dump: Output of faulthandler.
    """
    kept_lines = []
    for thread in dump.split("\n\n"):
        heading, *frames = thread.splitlines() or [""]
        user_frames = []
        for line in frames:
            match = re.match(_FRAME_LINE, line)
            if match is not None and is_user_file(match[1]):
                user_frames.append(line)
        if user_frames:
            kept_lines += [heading, *user_frames]
    return "\n".join(kept_lines) or dump


def format_short_traceback(error: BaseException) -> tuple[str, int]:
    """Format the traceback of an error without frames that do not help to find its cause.

    Frames of Headway are left out if Headway raised the error on purpose or only forwarded a call. Frames of torch that
    only forward a call are left out, too. An unexpected error inside Headway keeps all its frames.

    Args:
        error: Error to format.

    Returns:
        The text, and the number of frames left out. If it is 0, the text contains all frames. The C++ details that
            `remove_backend_noise` recognizes are always left out.
    """
    exception = traceback.TracebackException.from_exception(error)
    num_hidden = _remove_frames(exception, error, is_ours=False, seen=set())
    text = remove_backend_noise("".join(exception.format()))
    if num_hidden:
        frames = "frame" if num_hidden == 1 else "frames"
        note = f"({num_hidden} {frames} of Headway and torch left out; HEADWAY_LOG_LEVEL=debug shows all)"
        text = text.rstrip("\n") + f"\n{note}\n"
    return text, num_hidden


def _remove_frames(
    exception: traceback.TracebackException, error: BaseException | None, is_ours: bool, seen: set[int]
) -> int:
    """Remove frames of Headway and torch from the stacks of an exception, its causes and its sub-exceptions.

    Args:
        exception: Summary of the exception, which is changed.
        error: The exception itself. None if only its summary is known.
        is_ours: Whether Headway raised an outer exception on purpose. All frames of a stack may then be removed.
        seen: IDs of the summaries that were visited before.

    Returns:
        Number of frames removed.
    """
    if id(exception) in seen:
        return 0
    seen.add(id(exception))
    is_ours = is_ours or isinstance(error, HeadwayError)
    kept = _select_frames(list(exception.stack), is_ours)
    num_hidden = len(exception.stack) - len(kept)
    if num_hidden and not kept:
        exception.stack = None  # type: ignore[assignment]  # no "Traceback" heading above an empty stack
    elif num_hidden:
        exception.stack = traceback.StackSummary.from_list(kept)
    for name in ("__cause__", "__context__"):
        if (inner := getattr(exception, name)) is not None:
            num_hidden += _remove_frames(inner, getattr(error, name, None), is_ours, seen)
    sub_summaries = getattr(exception, "exceptions", None) or ()
    sub_errors = getattr(error, "exceptions", None) or ()
    for inner, sub_error in zip(sub_summaries, sub_errors):
        num_hidden += _remove_frames(inner, sub_error, is_ours, seen)
    return num_hidden


def _select_frames(frames: list[traceback.FrameSummary], is_ours: bool) -> list[traceback.FrameSummary]:
    """Return the frames of a traceback that are neither in Headway nor in code of torch that only forwards calls.

    All frames are returned if Headway's own code has failed by mistake, which `is_ours` excludes. The result can be empty
    only if `is_ours` is True.

    Args:
        frames: Frames of the traceback, outermost first.
        is_ours: Whether Headway raised the exception, or an outer one, on purpose.
    """
    if not frames or (is_headway_file(frames[-1].filename) and not is_ours):
        return frames
    kept = [frame for frame in frames if not is_headway_file(frame.filename) and not _is_forwarding(frame)]
    return kept if kept or is_ours else frames


def _is_forwarding(frame: traceback.FrameSummary) -> bool:
    """Whether a frame only forwards a call: generated code of dataclasses, Python's import system, or wrappers of torch."""
    if frame.filename == "<string>":
        return frame.name == "__init__"  # the __init__ that dataclasses generate
    return frame.filename.startswith(_FROZEN) or any(part in frame.filename for part in _FORWARDING_FILES)


def format_interrupt(error: KeyboardInterrupt) -> str:
    """Return one line of text that names the line of user code that Ctrl-C has interrupted.

    The text is shown instead of a traceback.
    """
    place = find_user_line(error.__traceback__)
    return "headway: stopped by Ctrl-C" + (f" at {place}" if place else "")


class _Printer:
    """Exception hook for `sys.excepthook` that prints shortened tracebacks, and one line for Ctrl-C.

    It calls the previous hook instead if `is_on` is False, or if there is nothing to shorten.
    """

    def __init__(self, is_short: Callable[[], bool]) -> None:
        self.previous_hook = sys.excepthook
        self.is_on = True
        self.notes: list[Callable[[BaseException], str]] = []
        # A hook that the program has installed formats tracebacks itself, so they are not shortened.
        self._is_short = is_short if self.previous_hook is sys.__excepthook__ else lambda: False

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_short = self.is_on and self._is_short()
        text, is_shorter = "", False
        if is_short and isinstance(error, KeyboardInterrupt):
            text, is_shorter = f"{format_interrupt(error)}\n", True
        elif is_short and isinstance(error, Exception):
            text, num_hidden = format_short_traceback(error)
            is_shorter = num_hidden > 0
        if is_shorter and sys.stderr is not None:
            sys.stderr.write(text)
            sys.stderr.flush()
        else:
            self.previous_hook(kind, error, trace)
        if self.is_on and (notes := self.format_notes(error)):
            print(notes, file=sys.stderr)

    def format_notes(self, error: BaseException) -> str:
        """Return the notes on an error, one paragraph each: the texts of the functions in `notes`."""
        return "\n".join(text for note in self.notes if (text := note(error)))


class ExceptionHook:
    """Hook for exceptions that end this process. It shortens their traceback and prints notes after it.

    The process runtime installs and removes it. If the program had already set its own hook, that hook prints the
    traceback. If the program sets its own hook later, that hook replaces this one and is left in place.
    """

    def __init__(self) -> None:
        self._printer: _Printer | None = None

    def install(self, is_short: Callable[[], bool]) -> None:
        """Install the hook as `sys.excepthook`. If it is already installed, do nothing.

        Args:
            is_short: Function that is called for each exception, and returns False to print the traceback as Python
                does.
        """
        if self._printer is None:
            self._printer = sys.excepthook = _Printer(is_short)

    def add_note(self, note: Callable[[BaseException], str]) -> None:
        """Register a function whose text is printed after the traceback. Do nothing if the hook is not installed.

        Args:
            note: Function of the exception. It returns the text, or "" to print nothing.
        """
        if self._printer is not None and note not in self._printer.notes:
            self._printer.notes.append(note)

    def format_notes(self, error: BaseException) -> str:
        """Return the notes on an error, one paragraph each: the texts of the functions registered with `add_note`.

        The result is "" if there are no texts.
        """
        return "" if self._printer is None else self._printer.format_notes(error)

    def uninstall(self) -> None:
        """Restore the previous hook, unless other code has replaced this one in the meantime."""
        if self._printer is None:
            return
        self._printer.is_on = False
        if sys.excepthook is self._printer:
            sys.excepthook = self._printer.previous_hook
        self._printer = None
