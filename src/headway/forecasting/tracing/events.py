"""What a trace consists of: memory that is asked for and given back, in order."""

from typing import NamedTuple


class MemoryEvent(NamedTuple):
    """Memory that is asked for or given back.

    Attributes:
        key: of the memory, the same at both; given anew for each request.
        num_bytes: asked for; given back: negative.
        what: the operation that asked for it.
        where: the user's line, "train.py:12 in main"; "" where none is.
        kind: what it turned out to be: one of `KINDS`.
        stream: on which it is asked for; 0: the one that computes.
    """

    key: int
    num_bytes: int
    what: str = ""
    where: str = ""
    kind: str = "temporaries"
    stream: int = 0


KINDS = (
    "weights", "buffers", "batch", "gradients", "optimizer state", "activations", "cast weights", "gathered weights", "buckets",
    "workspaces", "temporaries",
)  # fmt: skip
"""What memory is held for, in the order in which it is shown."""


UNSURE = "unsure"
"""What asks for memory that may come on top of all the rest; it is the last event of a trace, and never given back."""


def told_apart(events: list[MemoryEvent]) -> tuple[list[MemoryEvent], int]:
    """What is known to be asked for, and the bytes that may come on top."""
    if events and events[-1].what == UNSURE:
        return events[:-1], events[-1].num_bytes
    return events, 0


def plain_peak(events: list[MemoryEvent]) -> int:
    """The most bytes that were in use at once, without any rounding."""
    held = most = 0
    for event in events:
        held += event.num_bytes
        most = max(most, held)
    return most


def split_at(events: list[MemoryEvent], index: int) -> dict[str, int]:
    """Bytes in use right after the event of that index, by kind."""
    held: dict[str, int] = {}
    for event in events[: index + 1]:
        held[event.kind] = held.get(event.kind, 0) + event.num_bytes
    return {kind: held[kind] for kind in KINDS if held.get(kind)}
