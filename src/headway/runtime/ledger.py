"""The ledger: a small ring of the collectives this process entered, with the user's line for each."""

import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = str(Path(__file__).resolve().parent.parent)


@dataclass(frozen=True)
class Entry:
    """One collective: its number in this process, its kind, the user's line, and what was handed in."""

    sequence: int
    operation: str
    call_site: str
    detail: str


class Ledger:
    """The last `size` collectives, oldest first."""

    def __init__(self, size: int = 200) -> None:
        self.entries: deque[Entry] = deque(maxlen=size)
        self.sequence = 0

    def record(self, operation: str, detail: str = "") -> Entry:
        """Note that a collective is entered now."""
        self.sequence += 1
        entry = Entry(self.sequence, operation, call_site(), detail)
        self.entries.append(entry)
        return entry


def call_site() -> str:
    """`file:line` of the innermost frame outside Headway."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
