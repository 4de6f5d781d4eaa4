"""Where this process first used a CUDA device: the line of the user's that did, or the notebook's cell."""

import linecache
import os
import sys
from types import FrameType

import torch

_UNKNOWN = "before Headway was imported"
_place: str | None = None


def _is_library(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    inside = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
    return path.startswith((*inside, "<frozen")) or os.sep + "site-packages" + os.sep in path


def describe(frame: FrameType | None) -> str:
    """The innermost line of the user's code above `frame`; in a notebook with its cell's number.

    The cell is the one whose text holds the line, as IPython keeps it in `In`.
    """
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    if frame is None:
        return _UNKNOWN
    path, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(path, line).strip()
    cells = frame.f_globals.get("In")
    source = "".join(linecache.getlines(path)).strip()
    number = (
        next((n for n, cell in enumerate(cells) if cell.strip() == source), None) if isinstance(cells, list) else None
    )
    where = f"line {line} of the cell In [{number}]" if number and source else f"{path}:{line}"
    return f"{where}: {text}" if text else where


def _note() -> None:
    global _place
    _place = describe(sys._getframe(1))


def watch() -> None:
    """Note the line when CUDA is first used; called once, on import of the device table."""
    global _place
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        _place = _place or _UNKNOWN
        return
    # torch calls what is queued here at that moment, below the line that led to it.
    queue = getattr(torch.cuda, "_lazy_call", None)
    if queue is not None:
        queue(_note)


def first_use() -> str | None:
    """The place; None where no CUDA device was used."""
    return _place
