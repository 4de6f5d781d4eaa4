"""Record of the line of user code that first used a CUDA device in this process."""

import linecache
from types import FrameType

import torch

from headway.common import callsite, scope

_UNKNOWN = "before Headway was imported"


class FirstUse:
    """Record of the line of user code at which this process first used a CUDA device.

    Attributes:
        place: Description of the line in a file or a notebook cell. None if no CUDA device was used.
    """

    def __init__(self) -> None:
        self.place: str | None = None


def describe_frame(frame: FrameType | None) -> str:
    """Return file, line number and source line of user code at `frame`, as text.

    In a notebook, the text names the number of the cell instead of a file.

    Args:
        frame: Innermost frame of the user's code. None if unknown; the text then says that the use was before Headway
            was imported.
    """
    if frame is None:
        return _UNKNOWN
    path, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(path, line).strip()
    cell_number = _find_cell_number(frame)
    place = f"{path}:{line}" if cell_number is None else f"line {line} of the cell In [{cell_number}]"
    return f"{place}: {text}" if text else place


def _find_cell_number(frame: FrameType) -> int | None:
    """Return the number of the notebook cell whose code runs in `frame`, or None if it is not in a notebook cell.

    The file of a cell has no readable name. The cell is found by comparing the file's source with the texts of all cells,
    which IPython keeps in the list `In`.
    """
    cells = frame.f_globals.get("In")
    source = "".join(linecache.getlines(frame.f_code.co_filename)).strip()
    if not isinstance(cells, list) or not source:
        return None
    # Cell 0 does not exist: IPython fills the first entry with an empty text.
    return next((number for number, cell in enumerate(cells) if number and cell.strip() == source), None)


def note_first_use() -> None:
    """Record the current line of user code as the first use of CUDA."""
    scope.get_or_create(FirstUse).place = describe_frame(callsite.find_user_frame())


def watch_first_use() -> None:
    """Make torch call `note_first_use` when it initializes CUDA.

    If CUDA is already initialized, record that the line of its first use is unknown.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        scope.get_or_create(FirstUse).place = _UNKNOWN
        return
    # torch calls the queued functions while it initializes CUDA, so the line that caused this is still on the stack.
    queue = getattr(torch.cuda, "_lazy_call", None)
    if queue is not None:
        queue(note_first_use)
