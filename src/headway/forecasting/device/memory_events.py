"""Allocations and releases of memory as a list of events, and sums over such a list."""

from typing import NamedTuple

KINDS = (
    "weights", "buffers", "batch", "gradients", "optimizer state", "averages", "activations", "cast weights",
    "gathered weights", "buckets", "workspaces", "temporaries",
)  # fmt: skip
"""Kinds of memory, such as weights or activations, in the order in which reports list them."""


class MemoryEvent(NamedTuple):
    """Allocation or release of memory.

    Attributes:
        key: Identifier of the memory, shared by the allocation and the release. Every allocation has a new one.
        num_bytes: Bytes allocated. Negative for a release.
        operation: Operation that requested the memory.
        source_line: User's source line that requested the memory, such as "train.py:12 in main". Empty if unknown.
        kind: Use of the memory, one of `KINDS`.
        stream: CUDA stream of the allocation. 0 is the stream that computes.
    """

    key: int
    num_bytes: int
    operation: str = ""
    source_line: str = ""
    kind: str = "temporaries"
    stream: int = 0


class StepMemory(NamedTuple):
    """Memory that training steps request.

    Attributes:
        events: Allocations and frees, in order.
        unsure_bytes: Bytes that a run might need in addition, such as a kernel's workspace of unknown size.
    """

    events: list[MemoryEvent]
    unsure_bytes: int = 0


def compute_exact_peak(events: list[MemoryEvent]) -> int:
    """Return the maximum number of bytes in use, without rounding requests up to the allocator's block size."""
    in_use = peak = 0
    for event in events:
        in_use += event.num_bytes
        peak = max(peak, in_use)
    return peak


def split_by_kind(events: list[MemoryEvent], index: int) -> dict[str, int]:
    """Return the bytes in use right after the event with this index, by kind of memory.

    Kinds that use no memory are left out.
    """
    bytes_by_kind: dict[str, int] = {}
    for event in events[: index + 1]:
        bytes_by_kind[event.kind] = bytes_by_kind.get(event.kind, 0) + event.num_bytes
    return {kind: bytes_by_kind[kind] for kind in KINDS if bytes_by_kind.get(kind)}
