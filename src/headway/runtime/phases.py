"""Marks of a training step's phases, for who measures them; while nobody listens, a mark is one empty loop.

The phases follow each other without gaps: "forward" (everything up to backward: the batch, the model, the loss), "backward",
"step" (from a window's last backward to the end of the optimizer's step).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str], None]

_listeners: list[Listener] = []


def mark(phase: str) -> None:
    """Tell the listeners that `phase` begins here."""
    for listener in _listeners:
        listener(phase)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Let `listener` hear the marks made in the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
